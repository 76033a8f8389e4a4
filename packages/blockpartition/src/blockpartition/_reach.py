"""Which ends the first blocks can reach within a limit: a few intervals for each number of stages.

Greedy would keep only the furthest end. That is wrong here: a block must not be empty, and a layer that one stage
cannot hold may have to wait for the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from ._problem import ModeSlot, PlacedBlock, Problem, slowest

Interval = tuple[int, int]


class ReachableEnds:
    """The ends that blocks can reach if none takes longer than the limit.

    Ends from which the other stages could not do the rest within the limit are left out, even if layers could be
    divided: where cuts are expensive, ends fall into thousands of intervals, and few of them matter.

    problem, limit: what was asked.
    ends: for each number of stages, intervals of positions.
    beyond: no limit below this one reaches more.
    """

    def __init__(self, problem: Problem, limit: int) -> None:
        self.problem = problem
        self.limit = limit
        self.beyond = problem.endless
        self.ends: list[list[Interval]] = [[(0, 0)]]
        for j, modes in enumerate(problem.slots, 1):
            found = [interval for slot in modes for interval in self._advance(self.ends[-1], slot)]
            ends = _union(found, problem.n - len(problem.slots) + j)
            self.ends.append(self._hopeful(ends, problem.speeds[-1] - problem.speeds[j]))

    @property
    def complete(self) -> bool:
        """Whether all stages together can reach the end."""
        return bool(self.ends[-1]) and self.ends[-1][-1][1] == self.problem.n

    def _advance(self, starts: list[Interval], slot: ModeSlot) -> Iterator[Interval]:
        """Each end from its nearest start: that makes the smallest block, and the cut before it is not this stage's.

        Within an interval of starts, that is a block of one layer; behind it, the start is its last.
        """
        time, heavy = slot.time, slot.time.heavier(self.limit)
        if heavy:
            self._within(time.alone[heavy[0]])
        alone = sorted({*heavy, *slot.need.heavier(slot.room)})
        for (first, last), (until, _) in pairwise([*starts, (self.problem.n, self.problem.n)]):
            for layer in alone[bisect_left(alone, first) : bisect_left(alone, last)]:
                yield first + 1, layer
                first = layer + 1
            # Behind the interval the block begins at its last start, until there is a nearer one.
            stop = min(slot.need.last_end(last, slot.room), self.problem.next_pin[last], until)
            furthest = time.last_end(last, self.limit)
            if furthest < stop:
                self._within(time.prefix[furthest + 1] - time.prefix[last])
            # Up to here a block keeps the limit whatever its cut takes; from there on each end is looked at.
            sure = min(time.last_end(last, self.limit - time.most_leave), stop)
            yield first + 1, max(last, sure)
            for end in range(max(last, sure) + 1, min(furthest, stop) + 1):
                if self._within(time.of(last, end)):
                    yield end, end

    def _hopeful(self, ends: list[Interval], speed: int) -> list[Interval]:
        """Without those from which stages of this speed together could not do the rest."""
        work = self.problem.work
        first = bisect_left(work, work[-1] - self.limit * speed)
        hopeless = [min(b, first - 1) for a, b in ends if a < first]
        if hopeless and speed:  # a larger limit may bring back the last of them
            self._within(-(-(work[-1] - work[hopeless[-1]]) // speed))
        return [(max(a, first), b) for a, b in ends if b >= first]

    def _within(self, time: int) -> bool:
        """Whether the time is within the limit; if not, a limit that is as large may reach more."""
        if self.limit < time < self.beyond:
            self.beyond = time
        return time <= self.limit


def least_slowest(problem: Problem) -> list[PlacedBlock] | None:
    """Blocks of which the slowest takes the least time; None if nothing fits.

    Exact, as the search without stages: a success lowers the upper end to the time of a block, a failure raises the
    lower end to the least time that may reach more.
    """
    reach = ReachableEnds(problem, problem.endless)
    if not reach.complete:
        return None
    blocks = _trace(reach)
    low, high = -(-problem.work[-1] // problem.speeds[-1]), slowest(blocks)
    # `low` is a bound that may do, `high` one that does: with a time of a block each, so the search ends exactly.
    while low < high:
        reach = ReachableEnds(problem, (low + high) // 2)
        if reach.complete:
            blocks = _trace(reach)
            high = slowest(blocks)
        else:
            low = reach.beyond
    return blocks


def _trace(reach: ReachableEnds) -> list[PlacedBlock]:
    """Blocks that end at the last layer, found from the end backwards.

    Of the reachable starts of a block the closest to where the speeds would put the cut is taken.
    """
    problem, blocks, end = reach.problem, list[PlacedBlock](), reach.problem.n
    for j, modes in reversed(list(enumerate(problem.slots))):
        target = bisect_left(problem.work, problem.work[end] * problem.speeds[j] // problem.speeds[j + 1])
        for slot in modes:
            first = max(slot.first_start(end, reach.limit), problem.last_pin[end])
            spans = [(max(a, first), min(b, end - 1)) for a, b in reach.ends[j]]
            if nearest := [max(a, min(target, b)) for a, b in spans if a <= b]:
                blocks.append(PlacedBlock(min(nearest, key=lambda start: abs(start - target)), end, slot))
                break
        end = blocks[-1].start
    return blocks[::-1]


def positions(intervals: list[Interval]) -> Iterator[int]:
    """All positions in the intervals."""
    return (position for first, last in intervals for position in range(first, last + 1))


def _union(intervals: list[Interval], limit: int) -> list[Interval]:
    """Disjoint intervals, in order, of what lies in any and not beyond the limit."""
    merged: list[Interval] = []
    for first, last in sorted(intervals):
        last = min(last, limit)
        if first > last:
            continue
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged
