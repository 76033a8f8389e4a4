"""Gradients outside of ``.grad`` are those that autograd would put there."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe.engine._accumulate import GradientSums, added
from gpipe.engine._graph_leaves import below

from ..layers import DOUBLE

Uses = list[list[int]]
"""For each micro-batch, which parameters are factors of which it takes a sum, one by one."""

USES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=4)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(1.0, 5).double() + k) for k in range(3)]


def result(uses: list[int], weights: list[nn.Parameter], x: Tensor) -> Tensor:
    return sum((x * weights[k] for k in uses), x)


def found(uses: Uses, weights: list[nn.Parameter], scale: float = 1.0) -> tuple[dict[int, Tensor], list[Any]]:
    """The sums by parameter, and what flowed to the input of each micro-batch."""
    gradients, flowed = GradientSums(), []
    for each in uses:
        x = torch.ones(4, dtype=DOUBLE, requires_grad=True)
        y = result(each, weights, x)
        flowed += gradients.backward([y], [torch.ones_like(y)], below([y], [x]), [x])
    numbers = {id(weight): k for k, weight in enumerate(weights)}
    sums = {numbers[id(leaf)]: gradient for leaf, gradient in gradients.take(scale)}
    assert not list(gradients.take())
    return sums, flowed


@given(USES, st.sampled_from([1.0, 0.25]))
def test_sums_are_those_of_autograd(uses: Uses, scale: float) -> None:
    weights, plain = parameters(), parameters()
    sums, flowed = found(uses, weights, scale)
    inputs = [torch.ones(4, dtype=DOUBLE, requires_grad=True) for _ in uses]
    for each, x in zip(uses, inputs, strict=True):
        result(each, plain, x).backward(torch.ones(4))
    assert all(weight.grad is None for weight in weights)
    assert sums.keys() == {k for each in uses for k in each}
    torch.testing.assert_close([sums[k] for k in sums], [plain[k].grad * scale for k in sums])
    torch.testing.assert_close(flowed, [x.grad for x in inputs])


@given(USES)
def test_no_hook_of_gradients_that_are_accumulated_is_called(uses: Uses) -> None:
    weights = parameters()
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    found(uses, weights)


@given(USES)
def test_what_flows_on_is_in_memory_of_its_own(uses: Uses) -> None:
    weights = parameters()
    sums, flowed = found(uses, weights)
    before = {k: gradient.clone() for k, gradient in sums.items()}
    for gradient in flowed:
        gradient.zero_()
    torch.testing.assert_close(sums, before)


def test_a_function_of_ones_own_may_overwrite_its_gradient() -> None:
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.mul_(3)

    weight = nn.Parameter(torch.ones(4, dtype=DOUBLE))
    x = torch.ones(4, dtype=DOUBLE, requires_grad=True)
    y = weight + Overwrites.apply(x)  # both get the same gradient
    gradients = GradientSums()
    (flowed,) = gradients.backward([y], [torch.ones_like(y)], below([y], [x]), [x])
    ((_, own),) = gradients.take()
    assert own.tolist() == [1] * 4
    assert flowed is not None
    assert flowed.tolist() == [3] * 4


@given(st.lists(st.booleans(), min_size=1, max_size=4))
def test_sparse_gradients_add_up_with_others(kinds: list[bool]) -> None:
    indices = torch.tensor([[0, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.rand(2, 3), (4, 3), check_invariants=True)
    parts = [sparse if kind else torch.rand(4, 3) for kind in kinds]
    whole = parts[0]
    for part in parts[1:]:
        whole = added(whole, part)
    assert whole.is_sparse == all(kinds)
    dense = [part.to_dense() if part.is_sparse else part for part in (whole, *parts)]
    torch.testing.assert_close(dense[0], sum(dense[2:], dense[1]))
