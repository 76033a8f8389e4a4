"""Check that a recomputation returns the same outputs as its forward.

The outputs differ if layers have state that cannot be restored, for example in a closure, a list or a library.

The number of outputs, shapes, dtypes and ``requires_grad`` are always compared. All values are compared on the first
checkpointed micro-batch of a pipe, and always with ``GPIPE_CHECK=1`` in the environment. Otherwise up to 64 elements
per tensor are compared on the CPU, and none on accelerators, where the host would have to wait. Floating-point values
may differ by the square root of their dtype's precision (bfloat16's under autocast), relative to the largest value.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def checks_all() -> bool:
    text = os.environ.get("GPIPE_CHECK", "0")
    if text not in {"", "0", "1"}:
        raise ValueError(f"GPIPE_CHECK must be 0 or 1; got {text!r}")
    return text == "1"


class Sample:
    """The dtype, shape and ``requires_grad`` of a forward's outputs, with copies of some values (all if ``whole``)."""

    __slots__ = ("_kinds", "_values", "_whole")

    def __init__(self, outputs: Sequence[Tensor], *, whole: bool) -> None:
        self._whole = whole
        self._kinds = [_kind(tensor) for tensor in outputs]
        self._values = [_copy_values(tensor, whole) for tensor in outputs]

    def expect(self, outputs: Sequence[Tensor]) -> None:
        """Raise RuntimeError if ``outputs`` of the recomputation differ."""
        kinds = [_kind(tensor) for tensor in outputs]
        if kinds != self._kinds:
            raise _different(f"{_describe_kinds(self._kinds)}; now {_describe_kinds(kinds)}")
        for k, (before, tensor) in enumerate(zip(self._values, outputs, strict=True)):
            now = _copy_values(tensor, self._whole)
            if before is not None and now is not None and not _close(before, now):
                raise _different(f"tensor {k} of {len(kinds)} has other values by up to {_distance(before, now):.3g}")


def _different(what: str) -> RuntimeError:
    return RuntimeError(
        f"the recomputation of this partition gave another output than its forward ({what}); its layers depend on "
        "something that changes from call to call, such as a counter or a generator outside of the modules. Keep it in "
        "a buffer or an attribute, change it only if not gpipe.is_recomputing(), or use checkpoint='never'"
    )


_Kind = tuple[torch.dtype, torch.Size, bool]


def _kind(tensor: Tensor) -> _Kind:
    return tensor.dtype, tensor.shape, tensor.requires_grad


def _describe_kinds(kinds: Sequence[_Kind]) -> str:
    """
    >>> _describe_kinds([(torch.float32, torch.Size([2, 3]), False)])
    'float32[2, 3] without grad'
    """
    return ", ".join(
        f"{str(dtype).removeprefix('torch.')}{[*shape]} {'with' if requires_grad else 'without'} grad"
        for dtype, shape, requires_grad in kinds
    )


def _copy_values(tensor: Tensor, whole: bool) -> Tensor | None:
    """Return a copy of the values to compare, or None."""
    # Subclasses may redefine clone and take.
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dtype in COMPARABLE
    if not is_plain or tensor.is_meta:
        return None
    if whole:
        return tensor.detach().clone()
    # Detached, because the graph that the cell frees would stay alive. On an accelerator, the host would have to wait.
    return torch.take(tensor.detach(), _spread(tensor.numel())) if tensor.device.type == "cpu" else None


COMPARABLE = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""Dtypes that can be compared. Torch has hardly any operations for the rest, such as float8."""


@lru_cache(maxsize=256)
def _spread(elements: int) -> Tensor:
    # Double precision, because single precision would round the last index of a large tensor past the end.
    return torch.linspace(0, elements - 1, min(elements, 64), dtype=torch.float64, device="cpu").long()


def _close(a: Tensor, b: Tensor) -> bool:
    # The common case. The comparison below allocates several tensors.
    if torch.equal(a, b):
        return True
    if not a.is_floating_point() and not a.is_complex():
        return False
    tolerance = _tolerance(a.dtype, a.device.type)
    # Relative to the largest value, because a value near zero may be the difference of two large ones.
    scale = float(_wide(a).abs().nan_to_num(posinf=0).max())
    return torch.allclose(_wide(a), _wide(b), rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _tolerance(dtype: torch.dtype, device: str) -> float:
    # Autocast computes in a lower precision, even if the output has a higher one.
    coarse = torch.bfloat16 if torch.is_autocast_enabled(device) else dtype
    return math.sqrt(max(torch.finfo(dtype).eps, torch.finfo(coarse).eps))


def _wide(tensor: Tensor) -> Tensor:
    # Differences in half precision may overflow.
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((_wide(a) - _wide(b)).abs().nan_to_num(nan=torch.inf).max())
