"""The statistics of a device's allocator."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

import streams


class Reading(NamedTuple):
    now: int | None
    """Bytes allocated since the meter was made, less those freed."""
    peak: int | None
    """The peak of these bytes."""


class Meter(Protocol):
    def read(self) -> Reading: ...


class NoMeter:
    """For devices whose allocator has no statistics."""

    def read(self) -> Reading:
        return Reading(None, None)


class AcceleratorMeter:
    """Resets the peak statistics of the device: a peak of a short time cannot be read in another way."""

    def __init__(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        self._device = device
        self._start = torch.accelerator.memory_allocated(device)

    def read(self) -> Reading:
        now = torch.accelerator.memory_allocated(self._device)
        peak = torch.accelerator.max_memory_allocated(self._device)
        return Reading(now - self._start, peak - self._start)


def meter_for(device: torch.device) -> Meter:
    if not streams.has_streams(device):
        return NoMeter()
    try:
        return AcceleratorMeter(device)
    except RuntimeError:  # an accelerator's allocator may have no statistics
        return NoMeter()
