"""Which ways to train are worth a trial, and which of those that were tried is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from statistics import median

from ._candidate import Candidate, Space, by_seconds, key, simplicity
from ._search import neighbours

CLOSE = 0.02
"""Candidates whose medians differ by at most this share count as equally fast: a few steps are not more precise."""

_WORTH = 1.2
"""Candidates predicted to be slower than the fastest by this factor are not tried."""

_MOST, _TURNS, STEPS = 5, 5, 3
"""The most candidates that are tried, their turns, and the steps of each turn."""

_SECONDS = 2.0
"""No turn begins later than that. As many candidates are tried as can have two turns by then, but at least two."""


def finalists(space: Space, found: Sequence[Candidate], step: float) -> list[Candidate]:
    """The candidates that are worth a trial, the one expected to be the fastest first.

    They are those that were found, and those with a layer on the other side of a cut, since predictions are not exact.
    Of schedules that are expected to be equally fast, only the simplest is tried.

    Args:
        space: what was searched.
        found: there, the best first.
        step: the seconds of one, which say how many there is time for.
    """
    near = chain.from_iterable(neighbours(space, each) for each in found[:3])
    ways = list({key(each): each for each in (*found, *near)}.values())
    fastest = min(each.seconds for each in ways)
    worth = [each for each in ways if each.seconds <= _WORTH * fastest and not any(_stands_for(x, each) for x in ways)]
    affordable = int(_SECONDS / (2 * STEPS * step))
    return by_seconds(worth)[: max(2, min(_MOST, affordable))]


def race(ways: Sequence[Candidate], try_out: Callable[[Candidate], list[float]]) -> list[list[float]]:
    """The seconds of steps of each way, in turns: what slows the machine down for a while slows all of them.

    Args:
        ways: to train.
        try_out: trains one for :data:`STEPS` steps.
    """
    trials: list[list[float]] = [[] for _ in ways]
    for _ in range(_TURNS):
        for way, trial in zip(ways, trials, strict=True):
            trial += try_out(way)
        if sum(map(sum, trials)) > _SECONDS:
            break
    return trials


def winner(ways: Sequence[Candidate], trials: Sequence[Sequence[float]]) -> int:
    """The number of the simplest of those that were about as fast as the fastest."""
    bound = min(map(median, trials)) * (1 + CLOSE)
    near = [k for k, trial in enumerate(trials) if median(trial) <= bound]
    return min(near, key=lambda k: simplicity(ways[k]))


def _place(candidate: Candidate) -> tuple[object, ...]:
    return candidate.chunks, candidate.sizes, candidate.modes


def _stands_for(one: Candidate, other: Candidate) -> bool:
    """Whether ``one`` is expected to be as fast as ``other``, and differs in nothing but a simpler schedule."""
    as_fast = one.seconds <= other.seconds * (1 + CLOSE)
    return _place(one) == _place(other) and as_fast and simplicity(one) < simplicity(other)
