"""The placement that finishes m micro-batches first: latency + (m - 1) · slowest.

A faster slowest stage may need a slow stage or an expensive cut elsewhere. The search lowers a limit on the slowest
stage; within each limit the least latency, with a lower bound on the slowest stage, bounds the makespan from below.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from fractions import Fraction
from itertools import chain
from math import ceil

from ._problem import ModeSlot, PlacedBlock, Problem, makespan, slowest
from ._reach import Interval, ReachableEnds


def least_makespan(problem: Problem, best: list[PlacedBlock], gap: Fraction) -> tuple[list[PlacedBlock], int]:
    """Blocks whose makespan is at most 1 + gap times the least, and a lower bound for all others.

    ``best`` are the blocks with the least bottleneck.
    """
    # Placements whose slowest block takes `high` or longer are settled; none is faster than `low`.
    m = problem.microbatches or 1
    low, high, floor = slowest(best), problem.infinite, makespan(best, m)
    while low < high:
        blocks = least_latency(problem, high - 1)
        latency = makespan(blocks, 1)
        best = min(best, blocks, key=lambda found: makespan(found, m))
        # With a slowest block that takes as long as this one, or so long that the gap is kept, none is better.
        enough = ceil((makespan(best, m) / (1 + gap) - latency) / max(1, m - 1))
        high = max(low, min(slowest(blocks), enough))
        floor = min(floor, latency + (m - 1) * high)
    return best, min(floor, makespan(best, m))


def least_latency(problem: Problem, limit: int) -> list[PlacedBlock]:
    """Blocks within the limit, which has to be possible, with the least latency. O(k n log n)."""
    # For each position at which blocks can end, their least latency; and by stage, the start and slot of the last one.
    latencies, last = {0: 0}, list[dict[int, tuple[int, ModeSlot]]]()
    for modes, ends in zip(problem.slots, ReachableEnds(problem, limit).ends[1:], strict=True):
        before, latencies = latencies, {}
        last.append({})
        for slot in modes:
            for end, latency, start in _extensions(problem, before, slot, ends, limit):
                if end not in latencies or latency < latencies[end]:
                    latencies[end], last[-1][end] = latency, (start, slot)
    blocks, end = list[PlacedBlock](), problem.n
    for table in reversed(last):
        start, slot = table[end]
        blocks.append(PlacedBlock(start, end, slot))
        end = start
    return blocks[::-1]


def _extensions(
    problem: Problem, before: dict[int, int], slot: ModeSlot, ends: list[Interval], limit: int
) -> Iterable[tuple[int, int, int]]:
    """For each end, the least latency of blocks up to there and the start of the last one.

    The latency splits into a part of the end and one of the start. So the best start is a minimum over the allowed
    starts: candidates are kept in order, each dropped once a later one is as good.
    """
    time, coming = slot.time, sorted(before, reverse=True)
    starts, costs = list[int](), list[int]()
    for end in chain(*(range(first, last + 1) for first, last in ends)):
        while coming and coming[-1] < end:
            start = coming.pop()
            cost = before[start] - time.prefix[start]
            # Ends only grow, so an earlier start that is no better is never the best again.
            while costs and costs[-1] >= cost:
                starts.pop()
                costs.pop()
            starts.append(start)
            costs.append(cost)
        best = bisect_left(starts, problem.first_start(slot, end, limit))
        if best < len(starts):
            yield end, costs[best] + time.of(0, end), starts[best]
