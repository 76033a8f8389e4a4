"""Counts the bytes and FLOPs of one layer by running it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from microbatch import Batch

from ._allocations import GradientTracker
from ._enter import copied, enter_batch
from ._isolation import uncompiled
from ._loose import Loose, Watched
from ._partings import Parting, partings
from ._storages import tensor_bytes
from ._turn import SEED, turned
from ._walk import Visit


class Count(NamedTuple):
    """What was counted of a layer.

    Attributes:
        figures: fields of a :class:`LayerProfile`, by name.
        loose: the storages of the output to which nothing else refers.
        uncounted: operations whose FLOPs are missing.
        unsized: whether a storage has an unknown size, so that the layer has to be counted with real tensors.
    """

    figures: dict[str, Any]
    loose: Sequence[Loose]
    uncounted: frozenset[str]
    unsized: bool


def count(
    visit: Visit,
    loose: Sequence[Loose] = (),
    *,
    backward: bool = True,
    split: bool = False,
    mode: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[Batch, Count]:
    """Runs the forward, and counts the storages that it creates and that stay alive: those of the output, and of what
    the graph has saved. Then the backward, for the peaks and FLOPs. Compiled layers are counted uncompiled.

    Args:
        visit: the layer. It computes with a copy of its input, and the output is copied too; what is alive of the
            originals afterwards is what the layer needs.
        loose: the storages of the input that no earlier layer needs.
        backward: whether to run the backward.
        split: whether to count also what is kept between the two parts of a split backward.
        mode: makes a context for everything that runs.
    """
    visit = replace(visit, input=enter_batch(visit.input, copies=True))
    inputs = Watched(visit.input)
    tracker = GradientTracker()
    with uncompiled(), mode(), tracker:
        output, roots = visit.forward()
    found = {"saved_bytes": tracker.alive(), "output_bytes": tensor_bytes(output.value)}
    outputs, handed = Watched(output), copied(output)
    turn, parameters = turned(roots) if roots and backward else None, list(visit.layer.parameters())
    del visit, roots
    freed = sum(each.size for each in loose if not each.leaves & inputs.alive())
    del output
    gone = outputs.gone(inputs, loose)
    tracker.restart()
    parting = Parting(0, 0) if split else None  # without a backward there is nothing to do
    if turn is not None:
        with uncompiled(), mode():
            parting = partings(turn) if split else None
        assert turn.grad_fn is not None
        turn.grad_fn.register_hook(lambda *_: tracker.restart())
        with tracker.setting_aside(parameters), uncompiled(), mode(), tracker:
            torch.autograd.backward(turn, SEED)
    figures = {
        **found,
        "peak_bytes": tracker.peak,
        "flops": tracker.flops,
        "passing_bytes": sum(each.size for each in gone),
        "freed_bytes": freed,
        "backward_peak_bytes": tracker.backward_peak,
        "adding_peak_bytes": tracker.adding_peak,
        "parting_bytes": parting and parting.left,
        "parting_peak_bytes": parting and parting.peak,
    }
    return handed, Count(figures, gone, frozenset(tracker.uncounted), tracker.unsized)
