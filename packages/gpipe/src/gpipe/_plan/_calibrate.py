"""Train the best candidates for a few steps, in turns: what is taken was measured beside the others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from microbatch import scatter

from .._gpipe import GPipe
from ._candidate import Candidate, Space, by_seconds, key, schedule_of
from ._data import Expected
from ._finals import CLOSE, STEPS, finalists, race, winner
from ._rehearse import total
from ._verify import timed

UNSURE = Expected(0.88, 1.0, 1.25)
"""How steps were spread around predictions from layers that were measured alone (``docs/benchmarks/plan.md``)."""

_APART = 0.05
"""How far the median of another pipe's steps may be from those that were tried; its memory lies elsewhere."""


class Calibrated(NamedTuple):
    """What is known after some steps of training.

    Attributes:
        found: the ways to train, the best first; those that were tried with the seconds that they took.
        spread: the factors on those seconds for the quickest, the median and the slowest step.
        note: for the reader of the plan.
    """

    found: list[Candidate]
    spread: Expected
    note: str


def calibrated(
    space: Space,
    found: list[Candidate],
    model: nn.Sequential,
    devices: Sequence[torch.device],
    x: Any,
    y: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
) -> Calibrated:
    """What some steps of a copy of ``model`` tell of the best ways to train; nothing if there is no memory for a copy.

    Args:
        space: what was searched.
        found: there, the best first.
        model: stays as it is.
        devices: of the stages.
        x, y: a mini-batch.
        loss_fn: None for the sum of the outputs.
    """
    try:
        layers = copy.deepcopy(model)
        try_out = partial(_tried, layers, devices, x, y, loss_fn or total)
        ways = finalists(space, found, median(try_out(found[0])))
        trials = race(ways, try_out)
    except torch.OutOfMemoryError:
        return Calibrated(found, UNSURE, "not calibrated: there was no memory for a copy of the model")
    best = winner(ways, trials)
    took = median(trials[best])
    # Those that were not tried are expected to miss by as much as those that were.
    off = median(median(trial) / way.seconds for way, trial in zip(ways, trials, strict=True))
    note = (
        f"calibrated by steps of a copy: {len(ways)} ways were trained in turns, and of those within {CLOSE:.0%} of "
        f"the fastest the simplest was taken; steps took {off:.2f} times as long as layers alone predict"
    )
    spread = Expected((1 - _APART) * min(trials[best]) / took, 1.0, (1 + _APART) * max(trials[best]) / took)
    measured = [replace(way, seconds=median(trial)) for way, trial in zip(ways, trials, strict=True)]
    chosen, tried = measured.pop(best), {key(way) for way in ways}
    others = [replace(each, seconds=off * each.seconds) for each in found if key(each) not in tried]
    return Calibrated([chosen, *by_seconds([*measured, *others])], spread, note)


def _tried(
    layers: nn.Sequential,
    devices: Sequence[torch.device],
    x: Any,
    y: Any,
    loss_fn: Callable[[Any, Any], Any],
    way: Candidate,
) -> list[float]:
    """The seconds of some steps of training, after one to warm up."""
    pipe = GPipe(layers, way.sizes, devices=devices, chunks=way.chunks, checkpoint=way.modes)
    # By the name of zero bubble, a pipe finds out in its first steps what is worth splitting.
    microbatches = len(scatter(x, way.chunks))  # few rows give fewer than chunks
    schedule = schedule_of(way.schedule, microbatches, way.modes, way.split) if way.split else way.schedule
    with closing(pipe):
        pipe.zero_grad()
        return timed(pipe, x, y, loss_fn, schedule, STEPS)
