"""What the allocator of a device says, beside what is counted."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Reading(NamedTuple):
    now: int | None
    """Bytes allocated since the meter was made, less those freed."""
    peak: int | None
    """The most of them at any one time."""


class Meter(Protocol):
    def read(self) -> Reading: ...


class NoMeter:
    """For devices whose allocator keeps no statistics."""

    def read(self) -> Reading:
        return Reading(None, None)


class CUDAMeter:
    """Sets the peak statistics of the device back: there is no other way to see the peak of a short while."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._device = device
        self._start = torch.cuda.memory_allocated(device)

    def read(self) -> Reading:
        now, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        return Reading(now - self._start, peak - self._start)


def meter_for(device: torch.device) -> Meter:
    return CUDAMeter(device) if device.type == "cuda" else NoMeter()
