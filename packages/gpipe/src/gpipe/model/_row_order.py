"""Detect blocks whose rows for the full mini-batch are in a different order than the joined rows of micro-batches.

A model may sort its rows by length before its blocks, or join two inputs into one with twice as many rows::

    micro-batches      cat([a0, b0]), cat([a1, b1])    joined: a0 b0 a1 b1
    full mini-batch    cat([a0, a1, b0, b1])

So each entry of an argument has a number that identifies it. If the full mini-batch has the same numbers as the
micro-batches, but in a different order, the order of the rows is different as well. If the numbers themselves differ,
nothing follows from them. Batch norm, for example, computes statistics of the rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ._buffers import has_data

DIMS: Final = 2
"""The number of leading dimensions whose entries have numbers. The rows may be in any of them."""

SAMPLE: Final = 32
"""The number of an entry is computed from about this many elements in each of the remaining dimensions."""


class Entries(NamedTuple):
    """The entries of an argument of a block: the index of the call, of the tensor, and the dimension."""

    call: int
    argument: int
    dim: int


def get_numbered_dims(tensor: Tensor) -> range:
    """Return the dimensions of ``tensor`` whose entries have numbers."""
    has_elements = tensor.layout is torch.strided and has_data(tensor) and tensor.numel()
    return range(min(tensor.dim(), DIMS) if has_elements else 0)


@torch.no_grad()
def compute_numbers(tensor: Tensor, dim: int) -> Tensor:
    """Return one number per entry of ``tensor`` in dimension ``dim``, computed from a sample of its elements."""
    found = tensor.detach().movedim(dim, 0)
    found = found[(slice(None), *[slice(None, None, max(1, size // SAMPLE)) for size in found.shape[1:]])]
    entries = torch.view_as_real(found) if found.is_complex() else found
    entries = entries.reshape(len(found), -1).to(torch.float64 if entries.dtype is torch.float64 else torch.float32)
    # Not a plain sum, which is the same for all entries after a layer norm. All weights are positive, so that equal
    # elements do not cancel out, which would leave only their rounding.
    return entries @ (2 + torch.arange(entries.shape[1], device=entries.device).cos()).to(entries.dtype)


def are_in_order(parts: Sequence[Tensor], whole: Tensor, dtype: torch.dtype) -> bool | None:
    """Return whether the numbers of micro-batches, ``parts``, are in the order of ``whole``; None if they do not match.

    Args:
        dtype: the dtype of the tensor whose entries have these numbers.
    """
    joined = torch.cat([part.to(whole.device) for part in parts])
    if joined.shape != whole.shape or not whole.numel():
        return None
    relative = 1e-4 if not dtype.is_floating_point or torch.finfo(dtype).bits > 16 else 2e-2
    # A matrix product may round equal entries differently, depending on the number of entries.
    least = 32 * torch.finfo(whole.dtype).eps * whole.abs().max()
    rounding = ((whole.max() - whole.min()) * relative).maximum(least)
    off = (joined - whole).abs().max()
    are_same = (joined.sort().values - whole.sort().values).abs().max() <= rounding
    stays, moves = torch.stack([off <= rounding, are_same & (off > 10 * rounding)]).tolist()  # waits once
    return True if stays else False if moves else None
