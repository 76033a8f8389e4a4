"""Cut tensors by rows, exchange some of their rows, and measure how far tensors differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._trial import Signal

Dims = list[int | None]
"""For each tensor of a value the dimension of its rows; None if all micro-batches get it whole."""

ROUNDING = 1e-4
"""Differences below this, where no row depends on others, come from computing in a lower precision."""

_HUGE = 1e8
"""Values from here on, as in masks, are compared by their own size, and set no scale for smaller ones."""


class NoRowsError(ValueError):
    """The micro-batches of a tensor do not make up the whole of it."""


class OtherCallsError(RuntimeError):
    """A model calls other modules for a micro-batch than for all rows."""


class Cut(NamedTuple):
    """A division of a mini-batch into micro-batches, by rows. Tensors with more rows are divided in proportion."""

    rows: tuple[int, ...]

    def pieces(self, tensor: Tensor, dim: int | None) -> list[Tensor]:
        return (
            [tensor] * len(self.rows) if dim is None else list(torch.split(tensor, self._sizes(tensor.shape[dim]), dim))
        )

    def signals(self, whole: Signal, dims: Dims) -> list[Signal]:
        columns = [self.pieces(tensor, dim) for tensor, dim in zip(whole.tensors(), dims, strict=True)]
        return [whole.replaced(row) for row in zip(*columns, strict=True)] or [whole] * len(self.rows)

    def dims(self, whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> Dims:
        """The dimensions along which micro-batches make up the tensors of the whole; NoRowsError if there are none."""
        if {len(part) for part in parts} != {len(whole)}:
            raise NoRowsError("micro-batches give another number of tensors than the whole")
        return [self._dim(tensor.shape, [part[k].shape for part in parts]) for k, tensor in enumerate(whole)]

    def guessed(self, tensors: Sequence[Tensor], dims: Dims) -> Dims:
        """The dimensions of rows of ``tensors``, if they are those of other tensors, ``dims``."""
        known = sorted({dim for dim in dims if dim is not None})
        return [next((dim for dim in known if _entries(t, dim, sum(self.rows))), None) for t in tensors]

    def _sizes(self, size: int) -> list[int]:
        """The entries of micro-batches in a dimension of ``size``; none if the proportions cannot be kept."""
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
            f"the whole has shape {tuple(whole)}, its micro-batches {', '.join(map(str, map(tuple, parts)))}"
        )


def uneven(real: Cut) -> Cut:
    """Micro-batches of other sizes than the real ones, without a common divisor if possible: no groups of rows fit."""
    alone = (1,) if min(real.rows) == 1 and len(real.rows) > 2 else ()  # some layers fail on a single row
    rows = sum(real.rows) - sum(alone)
    if rows < 9:
        first = min(max(2, (rows - 1) // 2), rows - 1)
        return Cut((*alone, first, rows - first))
    # About 2/7, 1/3 and the rest, made odd where they would have a common divisor.
    first, second = rows * 2 // 7, rows // 3
    odd = math.gcd(first, second, rows) > 1
    return Cut((*alone, first + odd, second, rows - first - second - odd))


def exchanged(whole: Signal, dims: Dims, chosen: Tensor) -> Signal:
    """``whole`` with copies of other rows in place of the ``chosen`` ones."""
    rows = torch.arange(len(chosen))
    others = (rows + torch.randint(1, len(chosen), rows.shape, generator=torch.Generator().manual_seed(1))) % len(rows)
    changed = _selected(whole.tensors(), dims, len(rows), torch.where(chosen, others, rows))
    pairs = zip(whole.tensors(), changed, strict=True)
    return whole.replaced(
        [(old if new is None else new).detach().requires_grad_(old.requires_grad) for old, new in pairs]
    )


def kept(tensors: Sequence[Tensor], dims: Dims, chosen: Tensor) -> list[Tensor | None]:
    return _selected(tensors, dims, len(chosen), (~chosen).nonzero().flatten())


def _selected(tensors: Sequence[Tensor], dims: Dims, count: int, rows: Tensor) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for tensor, dim in zip(tensors, dims, strict=True):
        entries = _entries(tensor, dim, count)
        offsets = rows[:, None] * entries + torch.arange(entries)
        found.append(
            tensor.index_select(dim, offsets.flatten().to(tensor.device)) if dim is not None and entries else None
        )
    return found


def _entries(tensor: Tensor, dim: int | None, rows: int) -> int:
    """How many entries along ``dim`` belong to each of the ``rows``; 0 if the tensor is not divided like that."""
    return 0 if dim is None or dim >= tensor.dim() or tensor.shape[dim] % rows else tensor.shape[dim] // rows


def difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None], *, alike: bool = False) -> float:
    """The largest difference, relative to the largest expected value of its tensor; inf if shapes or types differ.

    With ``alike`` it is relative to the largest value of all tensors: a gradient that is nothing but rounding has no
    scale.
    """
    expected, found = [*_parts(expected)], [*_parts(found)]
    if len(expected) != len(found):
        return math.inf
    scales = [0.0 if tensor is None else _scale(tensor) for tensor in expected]
    least = max(scales, default=0.0) * (1 if alike else 1e-6)
    return max([_difference(a, b, max(s, least)) for a, b, s in zip(expected, found, scales, strict=True)], default=0.0)


def _parts(tensors: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
    """Yield the tensors inside of subclasses such as quantized weights, which have few operations of their own."""
    for tensor in tensors:
        if tensor is not None and is_traceable_wrapper_subclass(tensor):
            yield from _parts([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        else:
            yield tensor


def _difference(expected: Tensor | None, found: Tensor | None, scale: float) -> float:
    if expected is None or found is None:  # a gradient of zeros is as good as none
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


def figure(apart: float) -> str:
    return "another shape, type or not-a-number" if math.isinf(apart) else f"{apart:.1e}"
