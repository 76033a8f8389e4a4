"""Counts the bytes and FLOPs of one layer by running it once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from microbatch import Batch

from ._allocations import AllocationTracker
from ._enter import copied, enter_batch
from ._isolation import uncompiled
from ._storages import storages, tensor_bytes
from ._turn import SEED, turned
from ._walk import Visit


class Count(NamedTuple):
    """What was counted of a layer.

    Attributes:
        figures: fields of a :class:`LayerProfile`, by name.
        uncounted: operations whose FLOPs are missing.
        unsized: whether a storage has an unknown size, so that the layer has to be counted with real tensors.
    """

    figures: dict[str, int]
    uncounted: frozenset[str]
    unsized: bool


def count(
    visit: Visit, *, backward: bool = True, mode: Callable[[], AbstractContextManager[object]] = nullcontext
) -> tuple[Batch, Count]:
    """Runs the forward, and counts the storages that it creates and that stay alive: those of the output, and of what
    the graph has saved. Then the backward, for the peak and FLOPs. Compiled layers are counted uncompiled.

    Args:
        visit: the layer. It computes with a copy of its input, and the output is copied too; what is alive of the
            originals afterwards is what the layer needs.
        backward: whether to run the backward.
        mode: makes a context for everything that runs.
    """
    visit = replace(visit, input=enter_batch(visit.input, copies=True))
    inputs, tracker = _watched(visit.input), AllocationTracker()
    with uncompiled(), mode(), tracker:
        output, roots = visit.forward()
    saved, given = tracker.alive(), tensor_bytes(output.value)
    outputs, handed = _watched(output), copied(output)
    turn = turned(roots) if roots and backward else None
    # Of the inputs, only what the graph or the output needs is alive after this; of the outputs what the graph needs.
    del visit, roots
    freed = _gone(inputs)
    del output
    passing = _gone(outputs)
    if turn is not None:
        with uncompiled(), mode(), tracker:
            torch.autograd.backward(turn, SEED)
    figures = {
        "saved_bytes": saved,
        "output_bytes": given,
        "peak_bytes": tracker.peak,
        "flops": tracker.flops,
        "passing_bytes": passing,
        "freed_bytes": freed,
    }
    return handed, Count(figures, frozenset(tracker.uncounted), tracker.unsized)


_Watched = list[tuple["weakref.ref[torch.UntypedStorage]", int]]


def _watched(tensors: Iterable[torch.Tensor]) -> _Watched:
    """Weak references to the storages of these tensors, each once, and their bytes."""
    found = {storage._cdata: storage for storage in storages(list(tensors))}
    return [(weakref.ref(storage), storage.nbytes()) for storage in found.values()]


def _gone(watched: _Watched) -> int:
    """The bytes of those that were freed."""
    return sum(size for ref, size in watched if ref() is None)
