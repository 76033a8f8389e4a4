"""Row utilities: split tensors by rows, exchange rows, and measure differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._trial import Signal

Dims = list[int | None]
"""The row dimension of each tensor of a value; None for a tensor that is passed whole to all micro-batches."""

ROUNDING = 1e-4
"""Smaller differences are rounding in a lower precision, if exchanging rows shows that rows are independent."""

_HUGE = 1e8
"""Values from here on, such as fill values of masks, do not raise the scale for smaller values."""


class NoRowsError(ValueError):
    """The micro-batches of a tensor do not add up to the full tensor."""


class OtherCallsError(RuntimeError):
    """A model calls different modules for a micro-batch than for the full mini-batch."""


class Cut(NamedTuple):
    """The number of rows per micro-batch. Tensors with more entries than rows are split in proportion."""

    rows: tuple[int, ...]

    def pieces(self, tensor: Tensor, dim: int | None) -> list[Tensor]:
        return (
            [tensor] * len(self.rows) if dim is None else list(torch.split(tensor, self._sizes(tensor.shape[dim]), dim))
        )

    def signals(self, whole: Signal, dims: Dims) -> list[Signal]:
        columns = [self.pieces(tensor, dim) for tensor, dim in zip(whole.tensors(), dims, strict=True)]
        return [whole.replaced(row) for row in zip(*columns, strict=True)] or [whole] * len(self.rows)

    def dims(self, whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> Dims:
        """Return the dimensions along which ``parts`` divide the tensors of ``whole``; NoRowsError if none fits."""
        if {len(part) for part in parts} != {len(whole)}:
            raise NoRowsError("micro-batches return a different number of tensors than the full mini-batch")
        return [self._dim(tensor.shape, [part[k].shape for part in parts]) for k, tensor in enumerate(whole)]

    def guess_dims(self, tensors: Sequence[Tensor], dims: Dims) -> Dims:
        """Guess the row dimensions of ``tensors`` from ``dims``, the known row dimensions of related tensors."""
        known = sorted({dim for dim in dims if dim is not None})
        return [next((dim for dim in known if _entries(t, dim, sum(self.rows))), None) for t in tensors]

    def _sizes(self, size: int) -> list[int]:
        """Return the size of each micro-batch in a dimension of ``size``; empty if it does not divide in proportion."""
        if size * math.gcd(*self.rows) % sum(self.rows):
            return []
        return [rows * size // sum(self.rows) for rows in self.rows]

    def _dim(self, whole: torch.Size, parts: Sequence[torch.Size]) -> int | None:
        if all(shape == whole for shape in parts):
            return None
        for dim, size in enumerate(whole):
            if [shape[dim] for shape in parts if len(shape) == len(whole)] == self._sizes(size):
                return dim
        raise NoRowsError(
            f"the full mini-batch has shape {tuple(whole)}, its micro-batches {', '.join(map(str, map(tuple, parts)))}"
        )


def uneven(real: Cut) -> Cut:
    """Return uneven micro-batches, without a common divisor if possible, so that groups of rows are split."""
    alone = (1,) if min(real.rows) == 1 and len(real.rows) > 2 else ()  # some layers fail on a single row
    rows = sum(real.rows) - sum(alone)
    if rows < 9:
        first = min(max(2, (rows - 1) // 2), rows - 1)
        return Cut((*alone, first, rows - first))
    # About 2/7, 1/3 and the rest; one row is moved if these have a common divisor.
    first, second = rows * 2 // 7, rows // 3
    odd = math.gcd(first, second, rows) > 1
    return Cut((*alone, first + odd, second, rows - first - second - odd))


def exchange_rows(whole: Signal, dims: Dims, chosen: Tensor) -> Signal:
    """Return ``whole`` with the ``chosen`` rows replaced by copies of different rows."""
    rows = torch.arange(len(chosen))
    others = (rows + torch.randint(1, len(chosen), rows.shape, generator=torch.Generator().manual_seed(1))) % len(rows)
    changed = _select_rows(whole.tensors(), dims, len(rows), torch.where(chosen, others, rows))
    pairs = zip(whole.tensors(), changed, strict=True)
    return whole.replaced(
        [(old if new is None else new).detach().requires_grad_(old.requires_grad) for old, new in pairs]
    )


def select_kept(tensors: Sequence[Tensor], dims: Dims, chosen: Tensor) -> list[Tensor | None]:
    return _select_rows(tensors, dims, len(chosen), (~chosen).nonzero().flatten())


def _select_rows(tensors: Sequence[Tensor], dims: Dims, count: int, rows: Tensor) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for tensor, dim in zip(tensors, dims, strict=True):
        entries = _entries(tensor, dim, count)
        offsets = rows[:, None] * entries + torch.arange(entries)
        found.append(
            tensor.index_select(dim, offsets.flatten().to(tensor.device)) if dim is not None and entries else None
        )
    return found


def _entries(tensor: Tensor, dim: int | None, rows: int) -> int:
    """Return the number of entries along ``dim`` per row; 0 if the size is not a multiple of ``rows``."""
    return 0 if dim is None or dim >= tensor.dim() or tensor.shape[dim] % rows else tensor.shape[dim] // rows


def difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None], *, alike: bool = False) -> float:
    """Return the largest difference, relative to the tensor's largest expected value; inf if shapes or types differ.

    With ``alike``, it is relative to the largest value of all tensors, since a gradient that is only rounding has no
    scale.
    """
    expected, found = [*_parts(expected)], [*_parts(found)]
    if len(expected) != len(found):
        return math.inf
    scales = [0.0 if tensor is None else _scale(tensor) for tensor in expected]
    least = max(scales, default=0.0) * (1 if alike else 1e-6)
    return max([_difference(a, b, max(s, least)) for a, b, s in zip(expected, found, scales, strict=True)], default=0.0)


def _parts(tensors: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
    """Yield the tensors; of a subclass such as quantized weights, which supports few operations, yield the parts."""
    for tensor in tensors:
        if tensor is not None and is_traceable_wrapper_subclass(tensor):
            yield from _parts([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        else:
            yield tensor


def _difference(expected: Tensor | None, found: Tensor | None, scale: float) -> float:
    if expected is None or found is None:  # a missing gradient counts as zeros
        there = found if expected is None else expected
        return 0.0 if there is None else _difference(torch.zeros_like(there), there, scale)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return math.inf
    one, other = _wide(expected), _wide(found)
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    gap = (one - other).abs().nan_to_num(0, 0)
    return float((gap / one.abs().clamp(min=scale))[gap > 0].max()) if gap.any() else 0.0


def _scale(tensor: Tensor) -> float:
    sizes = _wide(tensor).abs().nan_to_num(0, 0).flatten()
    small = sizes[sizes < _HUGE]
    return float((small if small.numel() else sizes).max()) if sizes.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.to(torch.complex128 if tensor.is_complex() else torch.float64)


def figure(deviation: float) -> str:
    return "a different shape, dtype or non-finite values" if math.isinf(deviation) else f"{deviation:.1e}"
