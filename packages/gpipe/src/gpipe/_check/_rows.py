"""Find the dimension of rows of a tensor, and measure the difference of two tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class NoRowsError(Exception):
    """The parts of a tensor do not make up the whole of it."""


def dimension(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """The dimension along which ``parts`` make up ``whole``; None if each has the shape of the whole.

    Raises NoRowsError if there is none.
    """
    if all(part.shape == whole.shape for part in parts):
        return None
    for dim in range(whole.dim()):
        alike = all(part.dim() == whole.dim() and _without(part, dim) == _without(whole, dim) for part in parts)
        if alike and sum(part.shape[dim] for part in parts) == whole.shape[dim]:
            return dim
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    raise NoRowsError(f"the whole has shape {tuple(whole.shape)}, its micro-batches {shapes}")


def _without(tensor: Tensor, dim: int) -> torch.Size:
    return tensor.shape[:dim] + tensor.shape[dim + 1 :]


def cut(whole: Tensor, dim: int | None, parts: Sequence[Tensor]) -> list[Tensor]:
    """``whole`` in pieces of the sizes of ``parts``; itself for each if ``dim`` is None."""
    if dim is None:
        return [whole] * len(parts)
    return list(torch.split(whole, [part.shape[dim] for part in parts], dim))


def difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """The largest difference, relative to the largest expected value of all tensors; inf if shapes differ."""
    if len(expected) != len(found):
        return math.inf
    pairs = list(zip(expected, found, strict=True))
    scale = max([_largest(tensor) for tensor in expected if tensor is not None], default=0.0)
    return max([_difference(a, b, scale) for a, b in pairs], default=0.0)


def _difference(expected: Tensor | None, found: Tensor | None, scale: float) -> float:
    if expected is None or found is None:
        # A gradient of zeros is as good as none.
        return _relative(_largest(found if expected is None else expected), scale)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return math.inf
    if not _has_fractions(expected):
        return 0.0 if torch.equal(expected, found) else math.inf
    if not torch.equal(expected.isfinite(), found.isfinite()):
        return math.inf
    return _relative(_largest(_finite(expected) - _finite(found)), scale)


def _relative(size: float, scale: float) -> float:
    return 0.0 if size == 0 else size / scale if scale else math.inf


def _largest(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    return float(_finite(tensor).abs().max()) if _has_fractions(tensor) else 0.0


def _finite(tensor: Tensor) -> Tensor:
    wide = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    return torch.where(wide.isfinite(), wide, 0)


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
