"""What crosses from stage to stage begins a graph of its own, and is else as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpipe.values._leaves import (
    Activation,
    as_nonleaf,
    clone_leaves,
    detach_leaves,
    like_accumulated,
    own_memory,
    tensors_of,
    versions,
)
from gpipe.values._memory import storage_id

KINDS = st.sampled_from(["plain", "grad", "computed"])


def tensor(kind: str) -> Tensor:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_(kind != "plain")
    return x * 2 if kind == "computed" else x


def trees() -> st.SearchStrategy[Any]:
    """Tensors and constants in tuples, lists and dicts."""
    leaves = KINDS.map(tensor) | st.none() | st.integers()
    return st.recursive(
        leaves,
        lambda part: (
            st.lists(part, max_size=3) | st.lists(part, max_size=3).map(tuple) | st.dictionaries(st.text(), part)
        ),
        max_leaves=5,
    )


def shape_of(value: Any) -> Any:
    """The value with the numbers of tensors in their place."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    return type(value)(map(shape_of, value)) if isinstance(value, (list, tuple)) else value


@given(trees(), st.sampled_from([detach_leaves, clone_leaves]))
def test_leaves_have_the_values_and_ask_for_the_same_gradients(value: Any, cut: Any) -> None:
    before = Activation(value)
    after = cut(before)
    assert shape_of(after.value) == shape_of(value)
    assert all(map(lambda a, b: a is b, after.tensors, tensors_of(after.value)))
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert new.is_leaf
        assert new.requires_grad == old.requires_grad
        assert (storage_id(new) == storage_id(old)) == (cut is detach_leaves)


@given(st.lists(KINDS, max_size=4))
def test_what_enters_may_be_changed_in_place(kinds: list[str]) -> None:
    leaves = detach_leaves(Activation(tuple(map(tensor, kinds))))
    entered = as_nonleaf(leaves)
    before = versions(leaves)
    for leaf, own in zip(leaves.tensors, entered.tensors, strict=True):
        own.mul_(3)
        if leaf.requires_grad:
            own.sum().backward()
            assert leaf.grad.tolist() == [[3.0] * 3] * 2
    assert versions(leaves) == [version + 1 for version in before]  # no change of what entered is missed


def test_tensors_of_inference_have_versions_where_others_have() -> None:
    with torch.inference_mode():
        own = torch.zeros(1)
    changed = torch.zeros(1).add_(1)
    assert versions(Activation((own, changed))) == [0, 1]


@given(st.lists(st.none() | st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=2))
def test_gradients_that_are_sent_share_memory_with_nothing(found: list[int | None], kept: list[int]) -> None:
    memory = [torch.full((4,), float(k)) for k in range(3)]
    gradients = [None if k is None else memory[k][1:] for k in found]
    own = own_memory(gradients, [memory[k] for k in kept])
    sent = [gradient for gradient in own if gradient is not None]
    assert [None if gradient is None else gradient[0].item() for gradient in own] == found
    storages = [storage_id(each) for each in sent] + [storage_id(memory[k]) for k in set(kept)]
    assert len(storages) == len(set(storages))
    first = {found.index(k) for k in set(found) - {None, *kept}}
    assert all(own[n] is gradients[n] for n in first)  # no copy that is not needed


@pytest.mark.parametrize("layout", ["plain", "transposed", "expanded"])
def test_a_gradient_lies_in_memory_as_its_leaf(layout: str) -> None:
    leaf = torch.rand(3, 4).requires_grad_()
    gradient = {"plain": torch.rand(3, 4), "transposed": torch.rand(4, 3).T, "expanded": torch.rand(1).expand(3, 4)}
    found = like_accumulated(gradient[layout], leaf)
    assert found.stride() == leaf.stride()
    assert torch.equal(found, gradient[layout])
    assert not found.requires_grad
    assert (found is gradient[layout]) == (layout == "plain")


def test_no_gradient_and_a_sparse_one_stay_as_they_are() -> None:
    leaf, sparse = torch.rand(3, 4), torch.rand(3, 4).to_sparse()
    assert like_accumulated(None, leaf) is None
    assert like_accumulated(sparse, leaf) is sparse
