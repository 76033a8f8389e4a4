"""Run the plan for a few steps, to learn by how much layers in a pipe are slower than alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import Batch

from .._gpipe import GPipe
from ..schedule import Kind
from ..timeline import Timeline
from ._costs import SPLITTING, Measured
from ._data import Expected
from ._search import Candidate, Space, replayed
from ._verify import timed

_STEPS = 5

UNSURE = Expected(0.88, 1.0, 1.25)
"""How steps were spread around predictions from layers that were measured alone (``docs/benchmarks/plan.md``)."""


class Calibrated(NamedTuple):
    """What is known after some steps of training.

    Attributes:
        space: to search again, with the costs that were learned.
        spread: the factors on a replayed step for the quickest, the median and the slowest step.
        note: for the reader of the plan.
    """

    space: Space
    spread: Expected
    note: str


def calibrated(
    space: Space,
    candidate: Candidate,
    model: nn.Sequential,
    devices: Sequence[torch.device],
    x: Any,
    y: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
) -> Calibrated:
    """What some steps of a copy of ``model`` tell of its costs; nothing if there is no memory for a copy.

    Args:
        space: what was searched.
        candidate: the way to train that is tried.
        model: stays as it is.
        devices: of the stages.
        x, y: a mini-batch.
        loss_fn: None for the sum of the outputs.
    """
    try:
        pipe = GPipe(
            copy.deepcopy(model), candidate.sizes, devices=devices, chunks=candidate.chunks, checkpoint=candidate.modes
        )
        with closing(pipe):
            pipe.zero_grad()
            seconds, timeline = timed(pipe, x, y, loss_fn or sum_of_outputs, candidate.schedule, _STEPS)
    except torch.OutOfMemoryError:
        return Calibrated(space, UNSURE, "not calibrated: there was no memory for a copy of the model")
    measured = learned(space.measured, candidate, timeline)
    expected = replayed(replace(candidate, costs=measured.cut(candidate.chunks)))
    return Calibrated(
        replace(space, measured=measured),
        Expected(*(value / expected for value in (min(seconds), median(seconds), max(seconds)))),
        f"calibrated by steps of a copy: cells in the pipe made a step {expected / replayed(candidate):.2f} times as "
        "long as layers alone",
    )


def learned(measured: Measured, candidate: Candidate, timeline: Timeline) -> Measured:
    """The costs that led to the ``candidate``, with the cells of each stage in proportion to what its cells took."""
    stages = candidate.costs.stage_costs(candidate.sizes, candidate.modes)
    forward, backward = list(measured.forward), list(measured.backward)
    forward, backward = forward or [1.0] * measured.layers, backward or [1.0] * measured.layers
    for j, end in enumerate(accumulate(candidate.sizes)):
        own = slice(end - candidate.sizes[j], end)
        ahead = _factor(_median(timeline, j, Kind.FORWARD), stages[j].forward, measured.action)
        back = _factor(_backward(timeline, j), stages[j].backward, measured.action)
        forward[own] = [ahead * factor for factor in forward[own]]
        backward[own] = [back * factor for factor in backward[own]]
    return replace(measured, forward=tuple(forward), backward=tuple(backward))


def _backward(timeline: Timeline, stage: int) -> float | None:
    """What a backward took; where all were split, both parts without what splitting adds."""
    whole = _median(timeline, stage, Kind.BACKWARD)
    parts = [_median(timeline, stage, kind) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
    return whole if whole is not None or None in parts else sum(filter(None, parts)) - SPLITTING


def _median(timeline: Timeline, stage: int, kind: Kind) -> float | None:
    found = [event.seconds for event in timeline.events if event.stage == stage and event.kind is kind]
    return median(found) if found else None


def _factor(found: float | None, expected: float, action: float) -> float:
    """By how much the work of an action took longer than expected; 1 if there was none."""
    work = expected - action
    return 1.0 if found is None or work <= 0 else max(0.1, (found - action) / work)


def sum_of_outputs(output: Any, _: Any) -> Tensor:
    """A loss for a model whose own is not known."""
    parts = [tensor.float().sum() for tensor in Batch(output) if tensor.requires_grad]
    if not parts:
        raise ValueError(
            "no tensor of the output requires grad, so that there is nothing to train; plan(..., calibrate=False) "
            "plans for what is there"
        )
    return torch.stack(parts).sum()
