"""The statistics of a device's allocator."""

from __future__ import annotations

from collections.abc import Callable

import torch

import streams

Meter = Callable[[], tuple[int | None, int | None]]
"""Bytes allocated since the meter was made, less those freed, and the peak; None for what is not known."""


def no_meter() -> Meter:
    return lambda: (None, None)


def meter_for(device: torch.device) -> Meter:
    """Resets the peak statistics of the device: a peak of a short time cannot be read in another way."""
    if not streams.has_streams(device):
        return no_meter()
    memory = torch.accelerator
    try:
        memory.synchronize(device)
        memory.reset_peak_memory_stats(device)
        start = memory.memory_allocated(device)
    except RuntimeError:  # an accelerator's allocator may have no statistics
        return no_meter()
    return lambda: (memory.memory_allocated(device) - start, memory.max_memory_allocated(device) - start)
