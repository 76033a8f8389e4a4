"""Counts the bytes and FLOPs of one layer by running it once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from microbatch import Batch

from ._allocations import AllocationTracker
from ._allocator import Meter, NoMeter
from ._eager import uncompiled
from ._storages import tensor_bytes
from ._walk import Visit, gradients_for


class Count(NamedTuple):
    saved: int
    output: int
    peak: int
    flops: int
    workspace: bool
    """Whether some living storage is of unknown size, so that the layer has to be counted for real."""
    allocated: int | None
    allocated_peak: int | None


def count(
    visit: Visit,
    *,
    backward: bool,
    mode: AbstractContextManager[object] = nullcontext(),  # noqa: B008
    meter: Meter = NoMeter(),  # noqa: B008
) -> tuple[Batch, Count]:
    """Runs the forward under `mode`, and the backward too if wanted for the peak and the FLOPs.

    Saved are the storages born in the forward and alive after it: the output, and what the graph saved. Compiled
    layers are counted as they were written.
    """
    tracker = AllocationTracker()
    with uncompiled(), mode, tracker:
        output, roots = visit.forward()
    saved, workspace, allocated = tracker.alive(), tracker.holds_empty_workspace(), meter.read()
    if backward and roots:
        with mode:
            gradients = gradients_for(roots)
        with uncompiled(), mode, tracker:
            torch.autograd.backward(roots, gradients)
    peaks = tracker.peak, tracker.flops
    return output, Count(saved, tensor_bytes(output.value), *peaks, workspace, allocated.now, meter.read().peak)
