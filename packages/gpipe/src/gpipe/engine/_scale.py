"""The factor of all gradients, known after all losses are counted, without host synchronization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


class DeviceScale:
    """A factor on a device, with a value that the host does not know yet."""

    def __init__(self, factor: Tensor) -> None:
        self._factor = factor
        self._copies = {factor.device: factor}

    def on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = self._factor.to(device)
        return self._copies[device]


Scale = float | DeviceScale


def sum_counts(counts: Sequence[Any]) -> float | Tensor:
    """Return the sum of ``counts``: a tensor on a device if any of them is, so that the host need not wait."""
    there = [count for count in counts if _is_elsewhere(count)]
    # Converted to float, because counts may have a small integer dtype.
    here = math.fsum(float(count) for count in counts if not _is_elsewhere(count))
    if not there:
        return here
    device = there[-1].device
    parts = [count.detach().to(device).reshape(()).to(wide(device)) for count in there]
    return torch.stack(parts).sum() + here


def compute_scale(count: float | Tensor) -> Scale:
    """Return 1 / ``count``, or 0 if it is 0: an empty mean in torch is also NaN with zero gradients."""
    if isinstance(count, Tensor):
        # Not .item(), because the host would wait for it.
        return DeviceScale(count.reciprocal().masked_fill(count == 0, 0.0))
    if abs(count - 1.0) < 1e-12:  # the sum of fractions is 1: no scaling
        return 1.0
    return 1.0 / count if count else 0.0


def scale_gradient(gradient: Tensor, scale: Scale) -> Tensor:
    return gradient if scale == 1.0 else scale_in_place(gradient.clone(), scale)


def scale_in_place(gradient: Tensor, scale: Scale) -> Tensor:
    if isinstance(scale, float):
        return gradient if scale == 1.0 else gradient.mul_(scale)
    factor = scale.on(gradient.device)
    # A tensor factor would be rounded to the gradient's dtype, unlike a Python number.
    return gradient.copy_(gradient.float() * factor) if gradient.dtype in HALVES else gradient.mul_(factor)


def _is_elsewhere(count: Any) -> bool:
    return isinstance(count, Tensor) and count.device.type != "cpu"


def wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
