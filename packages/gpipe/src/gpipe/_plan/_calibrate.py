"""Train the best candidates for a few interleaved steps, so that the winner is measured next to the others."""

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
from ._dry_run import build_trial_pipe
from ._loss import StepLoss
from ._planned import Planned
from ._verify import time_steps

UNSURE = Expected(0.88, 1.0, 1.25)
"""The measured spread of steps around predictions from single layers, as factors (``docs/benchmarks/plan.md``)."""

CLOSE = 0.02
"""Candidates count as equally fast if their medians differ by at most this share, the precision of a few steps."""

_WORTH = 1.2
"""A candidate is not tried if its predicted time exceeds that many times the fastest."""

_MOST, _TURNS = 4, 5
"""The most candidates to try, and the most turns."""

_SECONDS = 2.0
"""No turn starts after that many seconds of steps, except the first."""

_APART = 0.05
"""How far the median step of a new pipe may deviate from the tried one, since its memory lies elsewhere."""


def try_candidates(
    fits: Callable[[Candidate], bool],
    found: Sequence[Candidate],
    try_out: Callable[[Candidate], list[float]],
    dry_run: Callable[[Candidate], Candidate],
) -> tuple[list[Candidate], Expected, str]:
    """Return the candidates, the best first. Tried candidates have measured seconds.

    Also return the factors on the best one's seconds for its fastest, median and slowest step, and a note for the plan.

    Args:
        fits: returns whether a candidate fits into the memory of the devices.
        found: the results of the search, the best first; that one fits according to its dry run.
        try_out: trains a candidate for some steps, and returns their seconds.
        dry_run: returns a candidate with the bytes of a dry run.
    """
    near = [each for each in found if each.seconds <= _WORTH * found[0].seconds]
    candidates = [found[0], *filter(fits, map(dry_run, near[1:_MOST]))]
    trials = _race(candidates, try_out)
    medians = [median(trial) for trial in trials]
    # Choose the simplest candidate that is about as fast as the fastest.
    tied = [k for k, seconds in enumerate(medians) if seconds <= min(medians) * (1 + CLOSE)]
    best = min(tied, key=lambda k: candidates[k].simplicity)
    # Predictions of untried candidates are corrected by the median error of the tried ones.
    off = median(seconds / candidate.seconds for candidate, seconds in zip(candidates, medians, strict=True))
    tried = {
        candidate.key: replace(candidate, seconds=seconds)
        for candidate, seconds in zip(candidates, medians, strict=True)
    }
    every = {each.key: replace(each, seconds=off * each.seconds) for each in found} | tried
    chosen = every.pop(candidates[best].key)
    low, high = min(trials[best]) / medians[best], max(trials[best]) / medians[best]
    return (
        [chosen, *by_seconds(every.values())],
        Expected((1 - _APART) * low, 1.0, (1 + _APART) * high),
        f"calibrated with a copy of the model: {len(candidates)} candidates were trained in interleaved steps, and the "
        f"simplest within {CLOSE:.0%} of the fastest was chosen; steps took {off:.2f} times as long as predicted",
    )


def _race(candidates: Sequence[Candidate], try_out: Callable[[Candidate], list[float]]) -> list[list[float]]:
    """Return the seconds of each candidate's steps. Candidates are interleaved, so that slow periods affect all."""
    trials: list[list[float]] = [[] for _ in candidates]
    for _ in range(_TURNS):
        for candidate, trial in zip(candidates, trials, strict=True):
            trial += try_out(candidate)
        if sum(map(sum, trials)) > _SECONDS:
            break
    return trials


def train(
    model: Planned,
    copied: nn.Module,
    devices: Sequence[torch.device],
    x: Any,
    y: Any,
    loss: StepLoss,
    candidate: Candidate,
) -> list[float]:
    """Return the seconds of some training steps, after warm-up steps."""
    measured = candidate.costs.measured
    own = [measured.reorder(devices)[place] for place in measured.placement]
    pipe = build_trial_pipe(model, copied, own, candidate.chunks, candidate)
    # If zero bubble is passed by its name, the pipe measures in its first steps which backwards are worth splitting.
    microbatches = len(scatter(x, candidate.chunks))  # fewer than chunks if there are few rows
    with closing(pipe):
        return time_steps(
            pipe,
            x,
            y,
            loss.arguments(),
            candidate.program(microbatches) if candidate.split or candidate.order else candidate.schedule,
        )
