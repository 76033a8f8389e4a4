"""The placement whose slowest stage is as fast as possible: bisection over the reachable ends."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction

from ._problem import Bound, Problem, Slot, Step
from ._reach import Hopeful, Interval, Reach


@dataclass(frozen=True)
class Chosen:
    """A block and the stage it is on."""

    start: int
    end: int
    slot: Slot


def least_slowest(problem: Problem) -> tuple[Fraction, list[Chosen]] | None:
    """The least time of the slowest block, and blocks within it; None if nothing fits.

    It is exact, as the search without stages: both ends of the bisection are times of blocks.
    """
    reach = Reach(problem, problem.unbounded)
    if not reach.complete:
        return None
    blocks = _trace(reach)
    low, high = problem.floor, slowest(problem, blocks)
    while low < high:
        reach = Hopeful(problem, Bound((low + high) / 2))
        if reach.complete:
            blocks = _trace(reach)
            high = slowest(problem, blocks)
        else:
            assert reach.next_bound is not None, problem  # `high` is reached
            low = reach.next_bound
    return high, blocks


def slowest(problem: Problem, blocks: list[Chosen]) -> Fraction:
    """The time of the block that takes longest."""
    return max(problem.time(block.start, block.end, block.slot) for block in blocks)


def _trace(reach: Reach) -> list[Chosen]:
    """Blocks that end at the last layer, found from the end backwards; each cut is close to where the speeds would put
    it.
    """
    problem, state, end = reach.problem, len(reach.ends) - 1, reach.problem.n
    blocks = []
    while state:
        step, start = next(
            (step, start) for step in problem.into[state] if (start := _start(reach, state, step, end)) is not None
        )
        blocks.append(Chosen(start, end, step.slot))
        state, end = step.before, start
    return blocks[::-1]


def _start(reach: Reach, state: int, step: Step, end: int) -> int | None:
    problem = reach.problem
    first = problem.first_start(end, step.slot, reach.bound.limit(step.slot.speed))
    share = step.slot.work.prefix[end] * problem.speeds[step.before] // max(1, problem.speeds[state])
    target = bisect_left(step.slot.work.prefix, share)
    if step.slot.need.entry or step.slot.work.entry:
        return _closest(_fitting(reach, step, first, end), target, first, end - 1)
    return _closest(reach.ends[step.before], target, first, end - 1)


def _fitting(reach: Reach, step: Step, first: int, end: int) -> list[Interval]:
    """The reachable starts from `first` on of a block that is within the bound and the room."""
    problem, slot = reach.problem, step.slot
    limit = reach.bound.limit(slot.speed)
    return [
        (start, start)
        for a, b in reach.ends[step.before]
        for start in range(max(a, first), min(b + 1, end))
        if slot.fits(start, end) and problem.occupied(start, end, slot) <= limit
    ]


def _closest(intervals: list[Interval], target: int, first: int, last: int) -> int | None:
    """The position of the intervals in first … last that is closest to the target."""
    clipped = [(max(a, first), min(b, last)) for a, b in intervals]
    candidates = [max(a, min(target, b)) for a, b in clipped if a <= b]
    return min(candidates, key=lambda position: abs(position - target), default=None)
