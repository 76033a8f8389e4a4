"""Which ends the first blocks can reach under a bound: a few intervals for each set of used stages.

Greedy would keep only the furthest end. That is wrong here: a block must not be empty, and a layer that one stage
cannot hold may have to wait for the next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import pairwise

from ._problem import Bound, Problem, Slot

Interval = tuple[int, int]


class Reach:
    """The reachable ends under a bound, and the least bound that would reach more."""

    def __init__(self, problem: Problem, bound: Bound) -> None:
        self.problem = problem
        self.bound = bound
        self.ends: list[list[Interval]] = [[(0, 0)]]
        self._beyond: dict[int, int] = {}  # for each speed the least work that exceeds the bound
        for state in range(1, len(problem.into)):
            self.ends.append(self._kept(state, self._into(state)))

    def _kept(self, state: int, ends: list[Interval]) -> list[Interval]:
        """All of them: whoever proves that nothing is within the bound has to show each."""
        return ends

    @property
    def complete(self) -> bool:
        """Whether all stages together can reach the end."""
        return bool(self.ends[-1]) and self.ends[-1][-1][1] == self.problem.n

    @property
    def next_bound(self) -> Fraction | None:
        """No bound below this one reaches more; None where no bound does."""
        return min((Fraction(work, speed) for speed, work in self._beyond.items() if speed), default=None)

    def _into(self, state: int) -> list[Interval]:
        ends: list[Interval] = []
        for step in self.problem.into[state]:
            advance = self._way(step.slot)
            ends += advance(self.ends[step.before], step.slot, self.bound.limit(step.slot.speed))
        return _union(ends, self.problem.last_position(state))

    def _way(self, slot: Slot) -> Callable[[list[Interval], Slot, int], Iterator[Interval]]:
        if slot.need.entry or slot.work.entry:
            return self._search
        return self._advance if self.problem.transfer is None else self._pay

    def _advance(self, starts: list[Interval], slot: Slot, limit: int) -> Iterator[Interval]:
        """Without transfer costs a block may always be shortened, so the starts of one run reach one interval."""
        heavy = slot.work.heavier(limit)
        if heavy:
            self._note(slot.speed, slot.work.of(heavy[0], heavy[0] + 1))
        for first, last in _runs(starts, sorted({*heavy, *slot.misfits})):
            end = slot.work.last_end(last, limit)
            fence = min(slot.need.last_end(last, slot.room), self.problem.next_pin[last])
            if end < fence:
                self._note(slot.speed, slot.work.of(last, end + 1))
            yield first + 1, min(end, fence)

    def _pay(self, starts: list[Interval], slot: Slot, limit: int) -> Iterator[Interval]:
        """With transfer costs, one end may be out of reach where a later one is not: each end from its nearest start.

        The nearest is the best: it makes the smallest block, and the cost of the cut before it is not this stage's.
        Only the last ends in reach of a start have to be looked at one by one.
        """
        problem, paid = self.problem, self.problem.paid(slot)
        heavy = paid.singles.above(limit)
        if heavy:
            self._note(slot.speed, problem.occupied(heavy[0], heavy[0] + 1, slot))
        alone = sorted({layer + 1 for layer in [*heavy, *slot.misfits]})
        for (first, last), (until, _) in pairwise([*starts, (problem.n, problem.n)]):
            yield from _runs([(first + 1, last)], alone)
            fence = min(slot.need.last_end(last, slot.room), problem.next_pin[last], until)
            furthest = max(last, slot.work.last_end(last, limit))
            if furthest < fence:
                self._note(slot.speed, paid.least_beyond(last, furthest))
            furthest = min(furthest, fence)
            sure = max(last, min(furthest, paid.sure_end(last, limit)))
            if last < sure:
                yield last + 1, sure
            for end in range(sure + 1, furthest + 1):
                work = problem.occupied(last, end, slot)
                if work <= limit:
                    yield end, end
                else:
                    self._note(slot.speed, work)

    def _search(self, starts: list[Interval], slot: Slot, limit: int) -> Iterator[Interval]:
        """Where blocks need something at their start, a shorter one may need more: find the best start for each end.

        A start is of no more use once a later one needs no more. What is left is in order of start and of need, so the
        nearest start from which a block fits is found by bisection; of those that fit, it makes the least work. If the
        need at the start is work, it is the first that is left.
        """
        measure = slot.need if slot.need.entry else slot.work
        assert measure.entry is not None, slot
        useful: list[int] = []
        needs: list[int] = []
        reached = _each(starts)
        coming = next(reached, None)
        for end in range(1, self.problem.n + 1):
            if coming == end - 1:
                need = measure.entry[coming] - measure.prefix[coming]
                while needs and needs[-1] >= need:
                    useful.pop()
                    needs.pop()
                useful.append(coming)
                needs.append(need)
                coming = next(reached, None)
            best = bisect_left(useful, self.problem.last_pin[end])
            if slot.need.entry:
                fitting = bisect_right(needs, slot.room - slot.need.prefix[end])
                best = fitting - 1 if fitting > best else len(needs)
            if best < len(needs):
                work = self.problem.occupied(useful[best], end, slot)
                if work <= limit:
                    yield end, end
                else:
                    self._note(slot.speed, work)

    def _note(self, speed: int, work: int) -> None:
        self._beyond[speed] = min(work, self._beyond.get(speed, work))


class Hopeful(Reach):
    """Only ends from which the other stages could do the rest within the bound, if layers could be divided.

    Where cuts are dear, what can be reached falls into thousands of pieces. Few of them matter.
    """

    def _kept(self, state: int, ends: list[Interval]) -> list[Interval]:
        problem = self.problem
        speed = problem.speeds[-1] - problem.speeds[state]
        if not speed or not ends:
            return ends
        sums = problem.least_sums
        first = bisect_left(sums, sums[-1] - self.bound.limit(speed))
        kept = [(max(a, first), b) for a, b in ends if b >= first]
        if ends[0][0] < first:  # a larger bound may bring back the last one that is left out
            last = max(min(b, first - 1) for a, b in ends if a < first)
            self._note(speed, sums[-1] - sums[last])
        return kept


def _each(intervals: list[Interval]) -> Iterator[int]:
    return (position for first, last in intervals for position in range(first, last + 1))


def _runs(starts: Iterable[Interval], excluded: list[int]) -> Iterator[Interval]:
    """The intervals without the excluded positions."""
    for first, last in starts:
        for hole in excluded[bisect_left(excluded, first) : bisect_right(excluded, last)]:
            if first < hole:
                yield first, hole - 1
            first = hole + 1
        if first <= last:
            yield first, last


def _union(intervals: Iterable[Interval], limit: int) -> list[Interval]:
    """Disjoint intervals, in order, of what lies in any and not beyond the limit."""
    merged: list[Interval] = []
    for first, last in sorted(intervals):
        last = min(last, limit)
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        elif first <= last:
            merged.append((first, last))
    return merged
