"""Join what a block has returned for micro-batches into what it returns for all rows.

The rows are where sizes differ between micro-batches with different numbers of rows. If all have as many, they are
where the arguments of the block have them: a replay has these for all rows, and so with other sizes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

UNKNOWN: Final = -1
NOWHERE: Final = -2


class Argument(NamedTuple):
    """A tensor among the arguments of a block.

    Attributes:
        size: its size for a micro-batch.
        dim: the dimension of its rows; NOWHERE if it is the same for all rows.
    """

    size: torch.Size
    dim: int


def dim_between(size: torch.Size, whole: torch.Size) -> int:
    """Return the dimension of the rows of a tensor with this ``size`` for a micro-batch, and ``whole`` for all rows."""
    if len(size) != len(whole):
        return UNKNOWN
    return _one([d for d, (a, b) in enumerate(zip(size, whole, strict=True)) if a != b])


def dim_by(arguments: Sequence[Argument], size: torch.Size) -> int:
    """Return the dimension of the rows of what a block with these ``arguments`` returns, with ``size``."""
    same = {dim for own, dim in arguments if own == size} - {UNKNOWN, NOWHERE}
    every = {dim for _, dim in arguments} - {NOWHERE}
    found = _one([*(same if len(same) == 1 else every)])
    return found if found < len(size) else UNKNOWN


def joined(parts: Sequence[Tensor], rows: Sequence[int], arguments: Sequence[Argument]) -> Tensor | None:
    """Return what a block has returned for micro-batches with so many ``rows``, as one tensor.

    Returns:
        None if it is not known where the tensors have their rows.
    """
    sizes = [part.shape for part in parts]
    dim = dim_by(arguments, sizes[0])
    if len({*sizes}) > 1:
        dim = next((found for size in sizes if (found := dim_between(sizes[0], size)) != NOWHERE), UNKNOWN)
    if dim == NOWHERE:
        return parts[0].clone()  # since it is computed from nothing that has rows
    if dim == UNKNOWN or len({(*size[:dim], *size[dim + 1 :]) for size in sizes}) > 1:
        return None
    # Parts of another number may be in another order, such as those of experts.
    first = sizes[0][dim]
    each = all(size[dim] * rows[0] == first * count for size, count in zip(sizes, rows, strict=True))
    return torch.cat([*parts], dim) if each and first % max(1, rows[0]) == 0 else None


def _one(dims: Sequence[int]) -> int:
    if not dims:
        return NOWHERE
    return dims[0] if len(dims) == 1 else UNKNOWN
