"""Run the plan for a few steps, to learn by how much layers in a pipe are slower than alone."""

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
from ..schedule import Kind
from ..schedule._flags import scheduled
from ..timeline import Timeline
from ._candidate import Candidate, Space, by_seconds, key, schedule_of, with_costs
from ._costs import SPLITTING, Measured, bounds
from ._data import Expected
from ._finals import CLOSE, STEPS, Trial, finalists, race, winner
from ._rehearse import total
from ._search import search
from ._verify import timed

UNSURE = Expected(0.88, 1.0, 1.25)
"""How steps were spread around predictions from layers that were measured alone (``docs/benchmarks/plan.md``)."""

_APART = 0.05
"""How far the median of another pipe's steps may be from those that were tried; its memory lies elsewhere."""


class Calibrated(NamedTuple):
    """What is known after some steps of training.

    Attributes:
        space: with the costs that were learned.
        found: the ways to train, the best first; those that were tried with the seconds that they took.
        spread: the factors on those seconds for the quickest, the median and the slowest step.
        note: for the reader of the plan.
    """

    space: Space
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

    The cells of the first one correct the costs. By those the ways that are worth a trial are found, and trained in
    turns. So what is taken was measured beside the others, and its seconds are measured ones.

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
        (first,) = race(found[:1], try_out)
        space, found, before = _corrected(space, found, first)
        ways = finalists(space, found, first.median)
        trials = race(ways, try_out)
    except torch.OutOfMemoryError:
        return Calibrated(space, found, UNSURE, "not calibrated: there was no memory for a copy of the model")
    best = winner(ways, trials)
    took = trials[best].median
    note = (
        f"calibrated by steps of a copy: cells in the pipe made a step {before:.2f} times as long as layers alone; "
        f"{len(ways)} ways were trained in turns, and of those within {CLOSE:.0%} of the fastest the simplest was taken"
    )
    low, high = (pick(trials[best].seconds) / took for pick in (min, max))
    spread = Expected((1 - _APART) * low, 1.0, (1 + _APART) * high)
    return Calibrated(*_ranked(space, found, ways, trials, best), spread, note)


def _corrected(space: Space, found: list[Candidate], first: Trial) -> tuple[Space, list[Candidate], float]:
    """The search again with the costs that the first trial tells, and how much longer they made that step."""
    tried = found[0]
    space = replace(space, measured=learned(space.measured, tried, first.timelines))
    now = with_costs(tried, space.measured)
    again = search(space)
    return space, [now, *(each for each in again if key(each) != key(now))], now.seconds / tried.seconds


def _ranked(
    space: Space, found: Sequence[Candidate], ways: Sequence[Candidate], trials: Sequence[Trial], best: int
) -> tuple[Space, list[Candidate]]:
    """The space with what the cells of the best way took, and all ways: that one, then those that were tried."""
    space = replace(space, measured=learned(space.measured, ways[best], trials[best].timelines))
    measured = [replace(way, seconds=trial.median) for way, trial in zip(ways, trials, strict=True)]
    chosen = replace(measured.pop(best), costs=space.measured.cut(ways[best].chunks))
    tried = {key(way) for way in ways}
    # The others are expected to miss by as much as those that were tried.
    off = median(trial.median / way.seconds for way, trial in zip(ways, trials, strict=True))
    others = [replace(each, seconds=off * each.seconds) for each in found if key(each) not in tried]
    return space, [chosen, *by_seconds([*measured, *others])]


def _tried(
    layers: nn.Sequential,
    devices: Sequence[torch.device],
    x: Any,
    y: Any,
    loss_fn: Callable[[Any, Any], Any],
    way: Candidate,
) -> Trial:
    """Some steps of training, after one to warm up, and another one that is recorded."""
    pipe = GPipe(layers, way.sizes, devices=devices, chunks=way.chunks, checkpoint=way.modes)
    # By the name of zero bubble, a pipe finds out in its first steps what is worth splitting.
    microbatches = len(scatter(x, way.chunks))  # few rows give fewer than chunks
    schedule = schedule_of(way.schedule, microbatches, way.modes, way.split) if way.split else way.schedule
    with closing(pipe):
        pipe.zero_grad()
        seconds, timeline = timed(pipe, x, y, loss_fn, schedule, STEPS)
    return Trial(seconds, [timeline])


def learned(measured: Measured, candidate: Candidate, timelines: Sequence[Timeline]) -> Measured:
    """The costs, corrected so that the cells of each stage are expected to take what they took.

    Args:
        measured: the costs that led to the candidate.
        candidate: what was trained.
        timelines: of its steps.
    """
    stages = candidate.costs.stage_costs(candidate.sizes, candidate.modes)
    # Backwards of stages in pieces compute some layers again, which is as much slower as their forwards are.
    whole = candidate.costs.stage_costs(candidate.sizes, [*map(scheduled, candidate.modes)])
    forward, backward = list(measured.forward), list(measured.backward)
    forward, backward = forward or [1.0] * measured.layers, backward or [1.0] * measured.layers
    for j, own in enumerate(slice(*each) for each in bounds(candidate.sizes)):
        ahead = _factor(_seconds(timelines, j, Kind.FORWARD), stages[j].forward, measured.action)
        again, took = stages[j].backward - whole[j].backward, _backward(timelines, j)
        back = _factor(took and max(0.0, took - ahead * again), whole[j].backward, measured.action)
        forward[own] = [ahead * factor for factor in forward[own]]
        backward[own] = [back * factor for factor in backward[own]]
    return replace(measured, forward=tuple(forward), backward=tuple(backward))


def _backward(timelines: Sequence[Timeline], stage: int) -> float | None:
    """What a backward took; where all were split, both parts without what splitting adds."""
    whole = _seconds(timelines, stage, Kind.BACKWARD)
    parts = [_seconds(timelines, stage, kind) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
    return whole if whole is not None or None in parts else sum(filter(None, parts)) - SPLITTING


def _seconds(timelines: Sequence[Timeline], stage: int, kind: Kind) -> float | None:
    """Of the median actions of each step the quickest, since whatever else the machine does only adds to it."""
    steps = [[e.seconds for e in each.events if e.stage == stage and e.kind is kind] for each in timelines]
    return min((median(step) for step in steps if step), default=None)


def _factor(found: float | None, expected: float, action: float) -> float:
    """By how much the work of an action took longer than expected; 1 if there was none."""
    work = expected - action
    return 1.0 if found is None or work <= 0 else max(0.1, (found - action) / work)
