"""The placement that finishes m micro-batches first: latency + (m - 1) · slowest.

The two terms are in conflict: a faster slowest stage may need a slow stage or an expensive cut elsewhere. The search
lowers a limit on the slowest stage. Within each limit the least latency is computed; together with a lower bound on the
slowest stage it is a lower bound on the makespan.
"""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from ._problem import ModeSlot, PlacedBlock, Problem, makespan, slowest
from ._reach import ReachableEnds, least_slowest, positions


class Makespan(NamedTuple):
    """The best placement found, a lower bound for all, and the times of the slowest block between which it holds."""

    blocks: list[PlacedBlock]
    floor: int
    thresholds: list[int]


def least_makespan(problem: Problem, microbatches: int, gap: Fraction) -> Makespan | None:
    """A placement whose makespan is at most 1 + gap times the least; None if nothing fits."""
    best = least_slowest(problem)
    if best is None:
        return None
    low, high, value = slowest(best), problem.endless, makespan(best, microbatches)
    floor, thresholds = value, [high]
    while low < high:
        blocks = least_latency(problem, high - 1)
        assert blocks is not None, problem  # `best` is within the limit
        latency = makespan(blocks, 1)
        best = min(best, blocks, key=lambda found: makespan(found, microbatches))
        value = makespan(best, microbatches)
        # With a slowest block that takes as long as this one, or so long that the gap is kept, none is better.
        enough = ceil((value / (1 + gap) - latency) / max(1, microbatches - 1))
        high = max(low, min(slowest(blocks), enough))
        thresholds.append(high)
        floor = min(floor, latency + (microbatches - 1) * high)
    return Makespan(best, min(floor, value), thresholds[::-1])


class _Arrival(NamedTuple):
    """The least latency of blocks that end at a position, and the last of them."""

    latency: int
    block: PlacedBlock | None


def least_latency(problem: Problem, limit: int) -> list[PlacedBlock] | None:
    """Blocks within the limit with the least latency; None if nothing fits. O(k n log n).

    With needs at the start of blocks, each start that the limit allows is looked at.
    """
    reach = ReachableEnds(problem, limit, hopeful=True)
    if not reach.complete:
        return None
    tables = [{0: _Arrival(0, None)}]
    for modes, ends in zip(problem.slots, reach.ends[1:], strict=True):
        table: dict[int, _Arrival] = {}
        for slot in modes:
            _extend(problem, tables[-1], slot, list(positions(ends)), limit, table)
        tables.append(table)
    blocks, end = list[PlacedBlock](), problem.n
    for table in reversed(tables[1:]):
        block = table[end].block
        assert block is not None, table
        blocks.append(block)
        end = block.start
    return blocks[::-1]


def _extend(
    problem: Problem,
    before: dict[int, _Arrival],
    slot: ModeSlot,
    ends: list[int],
    limit: int,
    table: dict[int, _Arrival],
) -> None:
    """Enter into the table what one more block makes better.

    The latency splits into a part of the end and a part of the start. So the best start is a minimum over the starts
    from the first one allowed: candidates are kept in order, each dropped once a later one is as good. With an entry
    none is dropped, since the earlier may need less.
    """
    time, need, coming = slot.time, slot.need, iter([*sorted(before), problem.n])
    start = next(coming)
    starts: list[int] = []
    costs: list[int] = []
    for end in ends:
        while start < end:
            cost = before[start].latency - time.prefix[start]
            while costs and costs[-1] >= cost and not need.entry:
                starts.pop()
                costs.pop()
            starts.append(start)
            costs.append(cost)
            start = next(coming)
        first = max(time.first_start(end, limit), need.first_start(end, slot.room), problem.last_pin[end])
        best = bisect_left(starts, first)
        if need.entry:
            fitting = (i for i in range(best, len(starts)) if need.of(starts[i], end) <= slot.room)
            best = min(fitting, key=costs.__getitem__, default=len(starts))
        if best < len(starts):
            latency = costs[best] + time.prefix[end] + (time.leave[end] if time.leave else 0)
            if end not in table or latency < table[end].latency:
                table[end] = _Arrival(latency, PlacedBlock(starts[best], end, slot))
