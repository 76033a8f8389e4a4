"""Block ends reachable within a time limit, stored as a few intervals per number of stages.

The furthest end alone is not enough: a block must not be empty, and a layer that does not fit on one stage may have to
go to the next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

from ._problem import ModeSlot, PlacedBlock, Problem, slowest

Interval = tuple[int, int]


class ReachableEnds:
    """The ends that blocks can reach if no block takes longer than the limit.

    Ends that leave more work than the remaining stages can do, even with divisible layers, are dropped. Otherwise
    expensive cuts would split the ends into thousands of intervals.

    ends: intervals of positions, per number of stages.
    next_limit: the smallest limit that may reach more ends.
    """

    def __init__(self, problem: Problem, limit: int) -> None:
        self.problem, self.limit = problem, limit
        self.next_limit = problem.infinite
        self.ends: list[list[Interval]] = [[(0, 0)]]
        for j, modes in enumerate(problem.slots, 1):
            found = [interval for slot in modes for interval in self._advance(self.ends[-1], slot)]
            # Each remaining stage needs at least one layer.
            self.ends.append(_union(found, self._first_sufficient(found, j), problem.n - len(problem.slots) + j))

    def _advance(self, starts: list[Interval], slot: ModeSlot) -> Iterator[Interval]:
        """Yield intervals of ends, each end reached from its nearest start, that is, by the smallest block.

        Within an interval of starts the smallest block has one layer; after it, the block starts at its last start.
        """
        time, pins, heavy = slot.time, self.problem.pins, slot.time.heavier(self.limit)
        if heavy:
            self._within(time.alone[heavy[0]])
        alone = sorted({*heavy, *slot.need.heavier(slot.room)})
        for (first, last), (until, _) in pairwise([*starts, (self.problem.n, self.problem.n)]):
            for layer in alone[bisect_left(alone, first) : bisect_left(alone, last)]:
                yield first + 1, layer
                first = layer + 1
            # After the interval the block begins at its last start, until the next interval offers a nearer one.
            pin = pins[bisect_right(pins, last)]
            stop = min(slot.need.last_end(last, slot.room), pin, until)
            furthest = time.last_end(last, self.limit)
            if furthest < stop:
                self._within(time.prefix[furthest + 1] - time.prefix[last])
            # Up to `sure` a block is within the limit whatever its cut costs; check each later end.
            sure = max(last, min(time.last_end(last, self.limit - time.most_leave), stop))
            yield first + 1, sure
            for end in range(sure + 1, min(furthest, stop) + 1):
                if self._within(time.of(last, end)):
                    yield end, end

    def _first_sufficient(self, ends: list[Interval], stages: int) -> int:
        """Return the first position from which the stages after the first `stages` might do the remaining work."""
        work, speed = self.problem.work, self.problem.speeds[-1] - self.problem.speeds[stages]
        first = bisect_left(work, work[-1] - self.limit * speed)
        dropped = [min(b, first - 1) for a, b in ends if a < first]
        if dropped and speed:  # a larger limit may keep the last of them
            self._within(-(-(work[-1] - work[max(dropped)]) // speed))
        return first

    def _within(self, time: int) -> bool:
        """Return whether the time is within the limit; if not, update `next_limit`."""
        if self.limit < time < self.next_limit:
            self.next_limit = time
        return time <= self.limit


def least_slowest(problem: Problem) -> list[PlacedBlock] | None:
    """Return blocks that minimize the time of the slowest one; None if nothing fits.

    A success lowers the upper bound of the search to the time of a block; a failure raises the lower bound to the
    smallest time that may reach more ends.
    """
    blocks: list[PlacedBlock] | None = None
    # `low` may be feasible and `high` is. Both become times of blocks, so the search ends at the exact optimum.
    low, high = -(-problem.work[-1] // problem.speeds[-1]), problem.infinite
    while low < high:
        # The first trial has no limit. If it fails, `next_limit` is infinite, which ends the search.
        reach = ReachableEnds(problem, (low + high) // 2 if blocks else high)
        if reach.ends[-1] and reach.ends[-1][-1][1] == problem.n:
            blocks = _trace(reach)
            high = slowest(blocks)
        else:
            low = reach.next_limit
    return blocks


def _trace(reach: ReachableEnds) -> list[PlacedBlock]:
    """Recover blocks that end at the last layer, from the end backwards.

    Each block starts at the reachable start that is closest to the cut that is proportional to the speeds.
    """
    problem, blocks, end = reach.problem, list[PlacedBlock](), reach.problem.n
    for j, modes in reversed(list(enumerate(problem.slots))):
        target = bisect_left(problem.work, problem.work[end] * problem.speeds[j] // problem.speeds[j + 1])
        # Every mode that can end here satisfies the limit; take the first, as documented.
        for slot in modes:
            first = problem.first_start(slot, end, reach.limit)
            spans = [(max(a, first), min(b, end - 1)) for a, b in reach.ends[j]]
            if nearest := [max(a, min(target, b)) for a, b in spans if a <= b]:
                blocks.append(PlacedBlock(min(nearest, key=lambda start: abs(start - target)), end, slot))
                break
        end = blocks[-1].start
    return blocks[::-1]


def _union(intervals: list[Interval], first: int, last: int) -> list[Interval]:
    """Merge intervals and clip them to `first` … `last`. The result is sorted and disjoint."""
    merged: list[Interval] = []
    for start, end in sorted((max(a, first), min(b, last)) for a, b in intervals):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif start <= end:
            merged.append((start, end))
    return merged
