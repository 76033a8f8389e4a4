"""Minimize the makespan of m micro-batches: latency + (m - 1) · slowest stage.

Speeding up the slowest stage may require slower stages or expensive cuts elsewhere. The search lowers a limit on the
slowest stage. Within each limit, the minimum latency and a lower bound on the slowest stage bound the makespan from
below.
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
    """Return blocks whose makespan is at most 1 + gap times the minimum, and a lower bound on every makespan.

    ``best`` are blocks with the minimum bottleneck.
    """
    # Placements whose slowest block takes at least `high` are settled, and no slowest block is faster than `low`.
    m = problem.microbatches or 1
    low, high, floor = slowest(best), problem.infinite, makespan(best, m)
    while low < high:
        blocks = least_latency(problem, high - 1)
        latency = makespan(blocks, 1)
        best = min(best, blocks, key=lambda found: makespan(found, m))
        # A slowest block at least as slow as this one, or slow enough to stay within the gap, cannot improve on `best`.
        enough = ceil((makespan(best, m) / (1 + gap) - latency) / max(1, m - 1))
        high = max(low, min(slowest(blocks), enough))
        floor = min(floor, latency + (m - 1) * high)
    return best, min(floor, makespan(best, m))


def least_latency(problem: Problem, limit: int) -> list[PlacedBlock]:
    """Return the blocks with the minimum latency within a feasible limit. O(k n log n)."""
    # The minimum latency up to each reachable end; and per stage, the start and slot of the block with this end.
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
    """Yield each end with the minimum latency of the blocks up to it and the start of the last block.

    The latency is the sum of a term of the end and a term of the start, so the best start is a sliding-window minimum
    over the allowed starts. Candidates are kept in order and dropped when a later one is as good.
    """
    time, coming = slot.time, sorted(before, reverse=True)
    starts, costs = list[int](), list[int]()
    for end in chain(*(range(first, last + 1) for first, last in ends)):
        while coming and coming[-1] < end:
            start = coming.pop()
            cost = before[start] - time.prefix[start]
            # Ends only grow, so an earlier start that is not better is never the best again.
            while costs and costs[-1] >= cost:
                starts.pop()
                costs.pop()
            starts.append(start)
            costs.append(cost)
        best = bisect_left(starts, problem.first_start(slot, end, limit))
        if best < len(starts):
            yield end, costs[best] + time.of(0, end), starts[best]
