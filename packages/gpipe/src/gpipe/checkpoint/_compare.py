"""Compare the outputs of a recomputation with those of its forward.

Layers may have state that cannot be restored: in a closure, a list, a library. Then the recomputation computes another
function, its gradients are wrong, and its outputs differ.

The number, shapes, dtypes and ``requires_grad`` of the outputs are always compared. Their values are compared on the
first checkpointed micro-batch of a pipe, and always if the environment variable ``GPIPE_CHECK`` is 1: it takes time,
and the host waits for an accelerator.

Kernels may round differently each time: floating-point values may differ by the square root of the precision of their
type, relative to the largest of them; by that of bfloat16 under autocast.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor


def checks_all() -> bool:
    """Whether ``GPIPE_CHECK`` asks to compare the values of every recomputation."""
    text = os.environ.get("GPIPE_CHECK", "0")
    if text not in {"", "0", "1"}:
        raise ValueError(f"GPIPE_CHECK must be 0 or 1; got {text!r}")
    return text == "1"


class Sample:
    """The kinds of the outputs of a forward, and copies of their values if these are compared too."""

    __slots__ = ("_kinds", "_values")

    def __init__(self, outputs: Sequence[Tensor], *, values: bool) -> None:
        self._kinds = [_kind(tensor) for tensor in outputs]
        self._values = [tensor.detach().clone() if values and _is_plain(tensor) else None for tensor in outputs]

    def expect(self, outputs: Sequence[Tensor]) -> None:
        """Raise RuntimeError if ``outputs``, those of the recomputation, are others."""
        kinds = [_kind(tensor) for tensor in outputs]
        if kinds != self._kinds:
            raise _different(f"{', '.join(self._kinds)}; now {', '.join(kinds)}")
        for k, (before, now) in enumerate(zip(self._values, outputs, strict=True)):
            if before is not None and not _close(before, now := now.detach()):
                raise _different(f"tensor {k} of {len(kinds)} has other values by up to {_distance(before, now):.3g}")


def _different(what: str) -> RuntimeError:
    return RuntimeError(
        f"the recomputation of this partition gave another output than its forward ({what}); its layers depend on "
        "something that changes from call to call, such as a counter or a generator outside of the modules. Keep it in "
        "a buffer or an attribute, change it only if not gpipe.is_recomputing(), or use checkpoint='never'"
    )


def _kind(tensor: Tensor) -> str:
    with_grad = "with" if tensor.requires_grad else "without"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {with_grad} grad"


def _is_plain(tensor: Tensor) -> bool:
    """Whether there are values that can be compared."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta


def _close(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b):
        return True
    if not a.is_floating_point() and not a.is_complex():
        return False
    tolerance = _tolerance(a.dtype, a.device.type)
    scale = float(_wide(a).abs().nan_to_num(posinf=0).max())
    return torch.allclose(_wide(a), _wide(b), rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _tolerance(dtype: torch.dtype, device: str) -> float:
    coarse = torch.bfloat16 if torch.is_autocast_enabled(device) else dtype
    return math.sqrt(max(torch.finfo(dtype).eps, torch.finfo(coarse).eps))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((_wide(a) - _wide(b)).abs().nan_to_num(nan=torch.inf).max())
