"""Counts the bytes and FLOPs of one layer by running it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from microbatch import Batch

from ._allocations import AllocationTracker
from ._allocator import Meter, NoMeter
from ._eager import uncompiled
from ._enter import copied, enter_batch
from ._gradients import GradientTracker
from ._loose import Loose, Watched
from ._partings import Parting, partings
from ._storages import tensor_bytes
from ._turn import SEED, turned
from ._walk import Visit


class Count(NamedTuple):
    """Bytes and FLOPs of a layer; see :class:`LayerProfile`.

    Attributes:
        workspace: whether a storage has an unknown size, so that the layer has to be counted with real tensors.
        loose: the storages of the output to which nothing else refers.
    """

    saved: int
    output: int
    peak: int
    flops: int
    workspace: bool
    allocated: int | None
    allocated_peak: int | None
    freed: int = 0
    backward_peak: int = 0
    adding_peak: int = 0
    given_peak: int = 0
    adding_given_peak: int = 0
    parting: Parting | None = None
    loose: Sequence[Loose] = ()


def count_forward(visit: Visit, mode: AbstractContextManager[object] = nullcontext()) -> tuple[Batch, Count]:  # noqa: B008
    """Runs the forward under `mode`, and counts the storages that it creates and that stay alive.

    These are those of the output, and of what the graph has saved. Compiled layers are counted uncompiled.
    """
    tracker = AllocationTracker()
    with uncompiled(), mode, tracker:
        output, _ = visit.forward()
    counted = Count(
        tracker.alive(),
        tensor_bytes(output.value),
        tracker.peak,
        tracker.flops,
        tracker.holds_empty_workspace(),
        None,
        None,
    )
    return output, counted


def count(
    visit: Visit,
    loose: Sequence[Loose] = (),
    *,
    split: bool = False,
    mode: AbstractContextManager[object] = nullcontext(),  # noqa: B008
    meter: Callable[[], Meter] = NoMeter,
) -> tuple[Batch, Count]:
    """Like :func:`count_forward`, with the backward, for the peaks and FLOPs.

    Args:
        visit: the layer. It computes with a copy of its input, and the output is copied too; what is alive of the
            originals afterwards is what the layer needs.
        loose: the storages of the input that no earlier layer needs.
        split: whether to count also what is kept between the two parts of a split backward.
        mode: a context for everything that runs.
        meter: makes a reader of the allocator's statistics.
    """
    visit = replace(visit, input=enter_batch(visit.input, copies=True))
    inputs = Watched(visit.input)
    tracker, allocator = GradientTracker(), meter()
    with uncompiled(), mode, tracker:
        output, roots = visit.forward()
    saved, workspace, allocated = tracker.alive(), tracker.holds_empty_workspace(), allocator.read()
    size, outputs, handed = tensor_bytes(output.value), Watched(output), copied(output)
    turn, parameters = turned(roots) if roots else None, list(visit.layer.parameters())
    del visit, roots
    freed = sum(each.size for each in loose if not each.leaves & inputs.alive())
    del output
    gone = outputs.gone(inputs, loose)
    peak, parting = tracker.restart(), Parting(0, 0) if split else None  # without a backward there is nothing to do
    if turn is not None:
        with uncompiled(), mode:
            parting = partings(turn) if split else None
        assert turn.grad_fn is not None
        turn.grad_fn.register_hook(lambda seeds, _: tracker.begin(seeds))
        with tracker.setting_aside(parameters), uncompiled(), mode, tracker:
            torch.autograd.backward(turn, SEED)
    return handed, Count(
        saved,
        size,
        max(peak, tracker.whole_peak),
        tracker.flops,
        workspace,
        allocated.now,
        allocator.read().peak,
        freed=freed,
        backward_peak=tracker.whole_peak,
        adding_peak=tracker.peak,
        given_peak=tracker.whole_given_peak,
        adding_given_peak=tracker.given_peak,
        parting=parting,
        loose=gone,
    )
