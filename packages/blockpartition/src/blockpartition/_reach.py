"""Which ends the first blocks can reach within a limit: a few intervals for each number of stages.

The furthest end alone is not enough: a block must not be empty, and a layer that one stage cannot hold may have to wait
for the next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

from ._problem import ModeSlot, PlacedBlock, Problem, slowest

Interval = tuple[int, int]


class ReachableEnds:
    """The ends that blocks can reach if none takes longer than the limit.

    Ends from which the other stages could not do the rest are left out, even if layers could be divided: where cuts are
    expensive, ends fall into thousands of intervals.

    ends: for each number of stages, intervals of positions.
    next_limit: no limit below this one reaches more.
    """

    def __init__(self, problem: Problem, limit: int) -> None:
        self.problem, self.limit = problem, limit
        self.next_limit = problem.infinite
        self.ends: list[list[Interval]] = [[(0, 0)]]
        for j, modes in enumerate(problem.slots, 1):
            found = [interval for slot in modes for interval in self._advance(self.ends[-1], slot)]
            # Each of the other stages needs a layer of its own.
            self.ends.append(_union(found, self._first_sufficient(found, j), problem.n - len(problem.slots) + j))

    def _advance(self, starts: list[Interval], slot: ModeSlot) -> Iterator[Interval]:
        """Each end from its nearest start, which makes the smallest block.

        Within an interval of starts, that is a block of one layer; behind it, the start is its last.
        """
        time, pins, heavy = slot.time, self.problem.pins, slot.time.heavier(self.limit)
        if heavy:
            self._within(time.alone[heavy[0]])
        alone = sorted({*heavy, *slot.need.heavier(slot.room)})
        for (first, last), (until, _) in pairwise([*starts, (self.problem.n, self.problem.n)]):
            for layer in alone[bisect_left(alone, first) : bisect_left(alone, last)]:
                yield first + 1, layer
                first = layer + 1
            # Behind the interval the block begins at its last start, until there is a nearer one.
            pin = pins[bisect_right(pins, last)]
            stop = min(slot.need.last_end(last, slot.room), pin, until)
            furthest = time.last_end(last, self.limit)
            if furthest < stop:
                self._within(time.prefix[furthest + 1] - time.prefix[last])
            # Up to here a block keeps the limit whatever its cut takes; from there on each end is looked at.
            sure = max(last, min(time.last_end(last, self.limit - time.most_leave), stop))
            yield first + 1, sure
            for end in range(sure + 1, min(furthest, stop) + 1):
                if self._within(time.of(last, end)):
                    yield end, end

    def _first_sufficient(self, ends: list[Interval], stages: int) -> int:
        """The first position from which the stages after so many could do the rest."""
        work, speed = self.problem.work, self.problem.speeds[-1] - self.problem.speeds[stages]
        first = bisect_left(work, work[-1] - self.limit * speed)
        dropped = [min(b, first - 1) for a, b in ends if a < first]
        if dropped and speed:  # a larger limit may bring back the last of them
            self._within(-(-(work[-1] - work[max(dropped)]) // speed))
        return first

    def _within(self, time: int) -> bool:
        """Whether the time is within the limit; if not, a limit that large may reach more."""
        if self.limit < time < self.next_limit:
            self.next_limit = time
        return time <= self.limit


def least_slowest(problem: Problem) -> list[PlacedBlock] | None:
    """Blocks of which the slowest takes the least time; None if nothing fits.

    A success lowers the upper end of the search to the time of a block, a failure raises the lower end to the least
    time that may reach more.
    """
    blocks: list[PlacedBlock] | None = None
    # `low` is a bound that may do, `high` one that does: with a time of a block each, so the search ends exactly.
    low, high = -(-problem.work[-1] // problem.speeds[-1]), problem.infinite
    while low < high:
        # First without a limit: if nothing fits then, `next_limit` is infinite, and the search is over.
        reach = ReachableEnds(problem, (low + high) // 2 if blocks else high)
        if reach.ends[-1] and reach.ends[-1][-1][1] == problem.n:
            blocks = _trace(reach)
            high = slowest(blocks)
        else:
            low = reach.next_limit
    return blocks


def _trace(reach: ReachableEnds) -> list[PlacedBlock]:
    """Blocks that end at the last layer, found from the end backwards.

    Of the reachable starts of a block it takes the closest to where the speeds would put the cut.
    """
    problem, blocks, end = reach.problem, list[PlacedBlock](), reach.problem.n
    for j, modes in reversed(list(enumerate(problem.slots))):
        target = bisect_left(problem.work, problem.work[end] * problem.speeds[j] // problem.speeds[j + 1])
        # Any mode that can end here will do for this limit; of several the first, as it is documented.
        for slot in modes:
            first = problem.first_start(slot, end, reach.limit)
            spans = [(max(a, first), min(b, end - 1)) for a, b in reach.ends[j]]
            if nearest := [max(a, min(target, b)) for a, b in spans if a <= b]:
                blocks.append(PlacedBlock(min(nearest, key=lambda start: abs(start - target)), end, slot))
                break
        end = blocks[-1].start
    return blocks[::-1]


def _union(intervals: list[Interval], first: int, last: int) -> list[Interval]:
    """Disjoint intervals, in order, of what lies in any and from `first` to `last`."""
    merged: list[Interval] = []
    for start, end in sorted((max(a, first), min(b, last)) for a, b in intervals):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif start <= end:
            merged.append((start, end))
    return merged
