"""The leaves below a result are those that its backward reaches."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gpipe.engine._graph_leaves import below

TERMS = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4)
"""For each tensor of a result, the leaves that it is the product of."""


def products(terms: list[list[int]], leaves: list[Tensor]) -> list[Tensor]:
    return [torch.stack([torch.ones(2), *(leaves[k] for k in term)]).prod(0) for term in terms]


@given(TERMS, st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)))
def test_they_get_the_gradients(terms: list[list[int]], frozen: set[int], inputs: set[int]) -> None:
    leaves = [torch.full((2,), k + 2.0, requires_grad=k not in frozen) for k in range(4)]
    results = products(terms, leaves)
    found = below(results, [leaves[k] for k in inputs])
    if any(result.requires_grad for result in results):
        sum(result.sum() for result in results).backward()
    reached = {k for k in range(4) if leaves[k].grad is not None}
    assert sorted(map(id, found.leaves)) == sorted(id(leaves[k]) for k in reached - inputs)
    assert not found.is_custom
    assert not found.hides


def test_a_leaf_may_be_the_result_itself() -> None:
    x = torch.ones(1, requires_grad=True)
    assert below([x]).leaves == [x]
    assert below([x], [x]).leaves == []


def test_nodes_in_python_and_graphs_of_their_own_are_told() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    x = torch.ones(1, requires_grad=True)
    assert below([Custom.apply(x)]).is_custom
    assert below([checkpoint(torch.sin, x, use_reentrant=True)]).hides
    assert not below([checkpoint(torch.sin, x, use_reentrant=False)]).hides
