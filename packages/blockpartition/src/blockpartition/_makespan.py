"""The placement that finishes m micro-batches first: latency + (m - 1) · slowest.

The two terms are in conflict: a faster slowest stage may need a slow stage or an expensive cut elsewhere. The search
goes over bounds on the slowest stage. Below each bound the least latency is computed; together with a lower bound on
the slowest stage it is a lower bound on the makespan.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from fractions import Fraction

from ._bottleneck import Chosen, least_slowest, slowest
from ._latency import latency, least_latency
from ._problem import Bound, Problem


@dataclass(frozen=True)
class Makespan:
    """The best placement found, a lower bound for all placements, and the bounds on the slowest stage that prove it."""

    blocks: list[Chosen]
    value: Fraction
    floor: Fraction
    thresholds: list[Fraction]


@dataclass(frozen=True, order=True)
class _Range:
    """Placements whose slowest block takes at least `floor` and less than `ceiling`; their makespan is at least
    `makespan`.
    """

    makespan: Fraction
    floor: Fraction = field(compare=False)
    ceiling: Fraction = field(compare=False)
    latency: Fraction = field(compare=False)


def makespan(problem: Problem, blocks: list[Chosen], microbatches: int) -> Fraction:
    """The time at which the last micro-batch leaves a pipeline of these blocks: latency + (m - 1) · slowest.

    A pipeline is a flow shop of equal jobs.

    Args:
        problem: what layers and cuts cost.
        blocks: of layers, with the mode of each.
        microbatches: m.

    Returns:
        The time, in the unit of the costs.
    """
    return latency(problem, blocks) + (microbatches - 1) * slowest(problem, blocks)


def least_makespan(problem: Problem, microbatches: int, gap: Fraction) -> Makespan | None:
    """A placement whose makespan is at most 1 + gap times the least; None if nothing fits.

    With gap 0 the bound descends from one occurring time to the next; with a gap ranges are halved, best floor first.
    """
    least = least_slowest(problem)
    if least is None:
        return None
    floor, blocks = least
    return _Search(problem, microbatches, gap, blocks).run(floor)


class _Search:
    def __init__(self, problem: Problem, microbatches: int, gap: Fraction, blocks: list[Chosen]) -> None:
        self.problem = problem
        self.microbatches = microbatches
        self.gap = gap
        self.blocks = blocks
        self.value = makespan(problem, blocks, microbatches)
        self.open: list[_Range] = []
        self.thresholds: set[Fraction] = set()

    def run(self, floor: Fraction) -> Makespan:
        self._look(floor, self.problem.unbounded.value)
        while self.open and self.open[0].makespan * (1 + self.gap) < self.value:
            self._split(heapq.heappop(self.open))
        proven = min([self.value, *(part.makespan for part in self.open)])
        return Makespan(self.blocks, self.value, proven, sorted(self.thresholds))

    def _split(self, part: _Range) -> None:
        """A slowest block at or above `useful` cannot win: look right below, or in the lower half of the rest."""
        useful = min(part.ceiling, (self.value - part.latency) / (self.microbatches - 1))
        middle = (part.floor + useful) / 2 if self.gap else useful
        self._open(middle, useful, part.latency)
        self._look(part.floor, middle)

    def _look(self, floor: Fraction, ceiling: Fraction) -> None:
        """Find the least latency below the ceiling: what is slower than its own slowest block is no better."""
        self.thresholds |= {floor, ceiling}
        blocks = least_latency(self.problem, Bound(ceiling, strict=True))
        if blocks is not None:
            self.blocks, self.value = min(
                (self.blocks, self.value),
                (blocks, makespan(self.problem, blocks, self.microbatches)),
                key=lambda found: found[1],
            )
            self._open(floor, slowest(self.problem, blocks), latency(self.problem, blocks))

    def _open(self, floor: Fraction, ceiling: Fraction, least: Fraction) -> None:
        self.thresholds |= {floor, ceiling}
        if floor < ceiling:
            heapq.heappush(self.open, _Range(least + (self.microbatches - 1) * floor, floor, ceiling, least))
