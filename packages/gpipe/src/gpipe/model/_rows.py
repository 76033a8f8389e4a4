"""Join the outputs of a block for micro-batches into its output for the full mini-batch.

The dimension of the rows is the one whose size differs between micro-batches with different numbers of rows. If all
have the same number, it is the dimension of the rows in the block's arguments: their sizes in a replay differ there,
because it has the arguments for the full mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from microbatch import Batch

from ..values._leaves import get_tensors

UNKNOWN: Final = -1
NOWHERE: Final = -2


class Argument(NamedTuple):
    """A tensor among the arguments of a block.

    Attributes:
        size: its size for a micro-batch.
        dim: the dimension of its rows; NOWHERE if its size does not depend on the number of rows.
        in_order: whether its entries for the full mini-batch have the same order as the joined entries for
            micro-batches; None if it is not known.
    """

    size: torch.Size
    dim: int
    in_order: bool | None = None


def are_outputs_in_order(arguments: Sequence[Argument]) -> bool | None:
    """Return whether the outputs of a block with these ``arguments`` are in order; None if that is not known."""
    known = {argument.in_order for argument in arguments} - {None}
    return None if not known else False not in known


def dim_between(size: torch.Size, whole: torch.Size) -> int:
    """Return the dimension of the rows if ``size`` is for a micro-batch, and ``whole`` for the full mini-batch."""
    if len(size) != len(whole):
        return UNKNOWN
    return _one([d for d, (a, b) in enumerate(zip(size, whole, strict=True)) if a != b])


def dim_by(arguments: Sequence[Argument], size: torch.Size) -> int:
    """Return the dimension of the rows in an output with this ``size``, of a block with these ``arguments``."""
    same = {dim for own, dim, _ in arguments if own == size} - {UNKNOWN, NOWHERE}
    if len(same) == 1:
        return same.pop()
    found = _one([*{argument.dim for argument in arguments} - {NOWHERE}])
    if found < 0:
        return found
    # Rows may be divided further, for example into tokens. Any different size may be a number of experts.
    known = {count for own, dim, _ in arguments if dim == found for count in accumulate(own[found:], mul)}
    return found if found < len(size) and size[found] in known else UNKNOWN


def list_row_counts(batches: Sequence[Batch], inputs: Any) -> list[Sequence[int]]:
    """Return the number of rows per micro-batch, then the numbers for each of the ``inputs`` with different rows."""
    found = dict.fromkeys(zip(*[batch.rows for batch in batches], strict=True))
    wholes, *columns = get_tensors(inputs), *[get_tensors(batch.value) for batch in batches]
    if all(len(column) == len(wholes) for column in columns):  # no list is cut by its entries
        for whole, *parts in zip(wholes, *columns, strict=True):
            dim = max(dim_between(part.shape, whole.shape) for part in parts)  # the first may be the whole
            if dim >= 0:
                found[tuple(part.shape[dim] for part in parts)] = None
    return [*found]


def join_rows(parts: Sequence[Tensor], counts: Sequence[Sequence[int]], arguments: Sequence[Argument]) -> Tensor | None:
    """Join an output of a block for micro-batches.

    Args:
        counts: the number of rows per micro-batch, then the numbers for inputs with different rows, such as pictures.

    Returns:
        The tensor, or None if the dimension of its rows is not known.
    """
    sizes = [part.shape for part in parts]
    dim, in_order = _find_dim(sizes, arguments), are_outputs_in_order(arguments)
    if dim == NOWHERE:
        return parts[0].clone()  # because it does not depend on rows
    if dim == UNKNOWN or in_order is False:
        return None
    # If a part has more or fewer entries than its rows imply, their order may be different, as in outputs of experts.
    is_known = in_order or any(_are_multiples([size[dim] for size in sizes], rows) for rows in counts)
    return torch.cat([*parts], dim) if is_known else None


def size_of_whole(sizes: Sequence[torch.Size], arguments: Sequence[Argument]) -> torch.Size | None:
    """Return the size for the full mini-batch of an output with these ``sizes`` for micro-batches, if it is known."""
    dim = _find_dim(sizes, arguments)
    first = sizes[0]
    return None if dim < 0 else torch.Size([*first[:dim], sum(size[dim] for size in sizes), *first[dim + 1 :]])


def _find_dim(sizes: Sequence[torch.Size], arguments: Sequence[Argument]) -> int:
    dim = dim_by(arguments, sizes[0])
    if len({*sizes}) > 1:
        dim = next((found for size in sizes if (found := dim_between(sizes[0], size)) != NOWHERE), UNKNOWN)
    return UNKNOWN if dim >= 0 and len({(*size[:dim], *size[dim + 1 :]) for size in sizes}) > 1 else dim


def _are_multiples(sizes: Sequence[int], rows: Sequence[int]) -> bool:
    same = all(size * rows[0] == sizes[0] * count for size, count in zip(sizes, rows, strict=True))
    return same and sizes[0] % max(1, rows[0]) == 0


def _one(dims: Sequence[int]) -> int:
    if not dims:
        return NOWHERE
    return dims[0] if len(dims) == 1 else UNKNOWN
