"""Values sent to a stage are leaves of a new graph, and otherwise unchanged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.values._leaves import is_dense, like_accumulated, own_memory, storage_id


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


dimensions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=3)
"""Sizes and steps."""


@given(dimensions, st.integers(0, 9))
def test_clone_preserves_dense_layout(cut: list[tuple[int, int]], offset: int):
    """The tensor's elements are in a storage of 40 elements, which contain their indices."""
    tensor = torch.arange(40).as_strided([size for size, _ in cut], [step for _, step in cut], offset)
    found = set(tensor.flatten().tolist())
    if is_dense(tensor) and found:
        assert len(found) == tensor.numel() == max(found) - min(found) + 1
        sizes = [k for k, size in enumerate(tensor.shape) if size > 1]
        assert [tensor.clone().stride(k) for k in sizes] == [tensor.stride(k) for k in sizes]
    assert is_dense(tensor.clone())
