"""The placement with the least sum of times (the time of one micro-batch), under a bound on the slowest stage."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from ._bottleneck import Chosen
from ._problem import Bound, Problem, Slot, Step


@dataclass(frozen=True)
class _Arrival:
    """The least sum with which blocks end at a position, the last step, and where its block starts."""

    cost: int
    step: Step | None = None
    start: int = 0


def latency(problem: Problem, blocks: list[Chosen]) -> Fraction:
    """How long one micro-batch takes: every stage in turn, and every cut, overlapped or not."""
    total = sum((Fraction(b.slot.work.of(b.start, b.end), b.slot.speed) for b in blocks), Fraction(0))
    return total + (sum(problem.transfer[b.end] for b in blocks) if problem.transfer else 0)


def least_latency(problem: Problem, bound: Bound) -> list[Chosen] | None:
    """Blocks with the least latency under the bound; None if nothing fits. O(k n log n) in a fixed order.

    With needs at the start of blocks, each start that a bound allows is looked at.
    """
    unit = math.lcm(*{step.slot.speed for steps in problem.into for step in steps})
    tables: list[list[_Arrival | None]] = [[_Arrival(0)] + [None] * problem.n]
    for steps in problem.into[1:]:
        table: list[_Arrival | None] = [None] * (problem.n + 1)
        for step in steps:
            for end, start, cost in _extend(problem, tables[step.before], step.slot, bound, unit):
                known = table[end]
                if known is None or cost < known.cost:
                    table[end] = _Arrival(cost, step, start)
        tables.append(table)
    return _trace(problem, tables)


def _extend(
    problem: Problem, before: list[_Arrival | None], slot: Slot, bound: Bound, unit: int
) -> Iterator[tuple[int, int, int]]:
    """Each end that one more block reaches, with the best start and the cost.

    The cost splits into a part of the end and a part of the start. So the best start is a minimum over the starts from
    the first one allowed: candidates are kept in order, each dropped as soon as a later one is as good.
    """
    weight, limit, prefix = unit // slot.speed, bound.limit(slot.speed), slot.work.prefix
    entered = slot.need.entry is not None
    starts: list[int] = []
    costs: list[int] = []
    for end in range(1, problem.n + 1):
        arrival = before[end - 1]
        if arrival is not None:
            cost = arrival.cost - weight * prefix[end - 1]
            while costs and costs[-1] >= cost and not entered:
                starts.pop()
                costs.pop()
            starts.append(end - 1)
            costs.append(cost)
        best = bisect_left(starts, problem.first_start(end, slot, limit))
        if entered:  # a later start that is as good may need more
            fitting = (i for i in range(best, len(starts)) if slot.fits(starts[i], end))
            best = min(fitting, key=costs.__getitem__, default=len(starts))
        if best < len(starts):
            transfer = unit * problem.transfer[end] if problem.transfer else 0
            yield end, starts[best], costs[best] + weight * prefix[end] + transfer


def _trace(problem: Problem, tables: list[list[_Arrival | None]]) -> list[Chosen] | None:
    arrival, end = tables[-1][problem.n], problem.n
    blocks = []
    while arrival is not None and arrival.step is not None:
        step, start = arrival.step, arrival.start
        blocks.append(Chosen(start, end, step.slot))
        arrival, end = tables[step.before][start], start
    return blocks[::-1] or None
