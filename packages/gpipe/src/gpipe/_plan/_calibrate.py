"""Train the best candidates for a few steps, in turns, so that what is taken was measured beside the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from microbatch import scatter

from ._candidate import Candidate, by_seconds
from ._data import Expected
from ._loss import StepLoss
from ._planned import Planned
from ._rehearse import tried_pipe
from ._verify import timed

UNSURE = Expected(0.88, 1.0, 1.25)
"""How steps were spread around predictions from layers that were measured alone (``docs/benchmarks/plan.md``)."""

CLOSE = 0.02
"""Candidates whose medians differ by at most this share count as equally fast: a few steps are not more precise."""

_WORTH = 1.2
"""Candidates predicted to be slower than the fastest by this factor are not tried."""

_MOST, _TURNS = 4, 5
"""The most candidates that are tried, and their turns."""

_SECONDS = 2.0
"""No turn but the first begins later than that."""

_APART = 0.05
"""How far the median of another pipe's steps may be from those that were tried; its memory lies elsewhere."""


def calibrated(
    memory: Sequence[int | None],
    found: Sequence[Candidate],
    try_out: Callable[[Candidate], list[float]],
    rehearse: Callable[[Candidate], Candidate],
) -> tuple[list[Candidate], Expected, str]:
    """The candidates, the best first, with the seconds that they took if they were tried.

    Also the factors on those seconds for the quickest, the median and the slowest step; and a note for the plan.

    Args:
        memory: the limits of devices.
        found: by the search, the best first, which fits by a rehearsal.
        try_out: trains a candidate for some steps; returns their seconds.
        rehearse: returns a candidate with the bytes of a rehearsal.
    """
    near = [each for each in found if each.seconds <= _WORTH * found[0].seconds]
    ways = [found[0], *(way for way in map(rehearse, near[1:_MOST]) if way.fits(memory))]
    trials = _race(ways, try_out)
    medians = [median(trial) for trial in trials]
    # The simplest of those that were about as fast as the fastest.
    tied = [k for k, seconds in enumerate(medians) if seconds <= min(medians) * (1 + CLOSE)]
    best = min(tied, key=lambda k: ways[k].simplicity)
    # Those that were not tried are expected to miss by as much as those that were.
    off = median(seconds / way.seconds for way, seconds in zip(ways, medians, strict=True))
    tried = {way.key: replace(way, seconds=seconds) for way, seconds in zip(ways, medians, strict=True)}
    every = {each.key: replace(each, seconds=off * each.seconds) for each in found} | tried
    chosen = every.pop(ways[best].key)
    low, high = min(trials[best]) / medians[best], max(trials[best]) / medians[best]
    return (
        [chosen, *by_seconds(every.values())],
        Expected((1 - _APART) * low, 1.0, (1 + _APART) * high),
        f"calibrated by steps of a copy: {len(ways)} ways were trained in turns, and of those within {CLOSE:.0%} of "
        f"the fastest the simplest was taken; steps took {off:.2f} times as long as layers alone predict",
    )


def _race(ways: Sequence[Candidate], try_out: Callable[[Candidate], list[float]]) -> list[list[float]]:
    """The seconds of steps of each candidate, in turns: a slow while of the machine slows all of them."""
    trials: list[list[float]] = [[] for _ in ways]
    for _ in range(_TURNS):
        for way, trial in zip(ways, trials, strict=True):
            trial += try_out(way)
        if sum(map(sum, trials)) > _SECONDS:
            break
    return trials


def train(
    model: Planned, copied: nn.Module, devices: Sequence[torch.device], x: Any, y: Any, loss: StepLoss, way: Candidate
) -> list[float]:
    """The seconds of some steps of training, after one to warm up."""
    own = [devices[place] for place in way.costs.measured.placement]
    pipe = tried_pipe(model, copied, own, way.chunks, way)
    # By the name of zero bubble, a pipe finds out in its first steps what is worth splitting.
    microbatches = len(scatter(x, way.chunks))  # few rows give fewer than chunks
    with closing(pipe):
        return timed(pipe, x, y, loss.arguments(), way.program(microbatches) if way.split else way.schedule)
