"""Which tensors fill their memory."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.values._leaves import is_dense

dimensions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=3)
"""Sizes and steps."""


@given(dimensions, st.integers(0, 9))
def test_a_clone_of_what_is_dense_is_laid_out_alike(cut: list[tuple[int, int]], offset: int):
    """Of a tensor whose elements lie somewhere in a storage of 40 elements, and are their numbers there."""
    tensor = torch.arange(40).as_strided([size for size, _ in cut], [step for _, step in cut], offset)
    found = set(tensor.flatten().tolist())
    if is_dense(tensor) and found:
        assert len(found) == tensor.numel() == max(found) - min(found) + 1
        sizes = [k for k, size in enumerate(tensor.shape) if size > 1]
        assert [tensor.clone().stride(k) for k in sizes] == [tensor.stride(k) for k in sizes]
    assert is_dense(tensor.clone())
