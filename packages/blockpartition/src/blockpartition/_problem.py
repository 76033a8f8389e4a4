"""A placement problem in integers: positions where a cut may be, and the stages that blocks are put on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import sub

from ._numbers import Grid, Scale


@dataclass(frozen=True, eq=False)
class Measure:
    """The time or the memory of blocks.

    prefix: for each position the sum of all layers before it.
    upto: the same with what a block needs on top if it ends there.
    """

    prefix: list[int]
    upto: list[int]

    def of(self, start: int, end: int) -> int:
        return self.upto[end] - self.prefix[start]

    def last_end(self, start: int, limit: int) -> int:
        """The furthest end of layers from `start` within the limit; not beyond `start` if there is none."""
        return bisect_right(self.prefix, self.prefix[start] + limit) - 1

    def heavier(self, limit: int) -> list[int]:
        """The layers that exceed the limit alone, in order of weight: no block within the limit ends with one."""
        if self.alone[self._ranking[-1]] <= limit:
            return []
        return self._ranking[bisect_right(self._ranking, limit, key=self.alone.__getitem__) :]

    @cached_property
    def alone(self) -> list[int]:
        return list(map(sub, self.upto[1:], self.prefix))

    @cached_property
    def _ranking(self) -> list[int]:
        return sorted(range(len(self.alone)), key=self.alone.__getitem__)

    @cached_property
    def most_leave(self) -> int:
        return max(end - start for end, start in zip(self.upto, self.prefix, strict=True))


@dataclass(frozen=True, eq=False)
class ModeSlot:
    """A stage in one of its modes: what blocks take there, and need of the room."""

    mode: str | None
    time: Measure
    need: Measure
    room: int


@dataclass(frozen=True)
class PlacedBlock:
    """Layers from one position to another, and where they run."""

    start: int
    end: int
    slot: ModeSlot

    @property
    def time(self) -> int:
        """How long it keeps its stage busy, the cut after it included."""
        return self.slot.time.of(self.start, self.end)


@dataclass(frozen=True)
class Problem:
    """Positions 0 … n are the possible cuts: layers kept together by forbidden cuts are one layer here.

    positions: the layer at which each position lies.
    pins: the positions at which a block has to end, from 0 to n.
    slots: for each stage its modes.
    work: for each position the time of the layers before it, at speed 1.
    speeds: for each number of stages, from 0 on, the sum of the speeds of the first, each in its fastest mode.
    time, memory: what these times and amounts of memory are in the caller's units.
    lower_bound: no placement is faster.
    """

    costs: Grid
    positions: list[int]
    pins: list[int]
    slots: list[list[ModeSlot]]
    work: list[int]
    speeds: list[int]
    time: Scale
    memory: Scale
    microbatches: int | None
    lower_bound: Fraction

    @property
    def n(self) -> int:
        return len(self.positions) - 1

    def first_start(self, slot: ModeSlot, end: int, limit: int) -> int:
        """The furthest start of a block up to `end` that keeps the limit of time, fits, and goes across no pin.

        It is `end` or more if there is none.
        """
        time, need, pin = slot.time, slot.need, self.pins[bisect_left(self.pins, end) - 1]
        quick, small = time.upto[end] - limit, need.upto[end] - slot.room
        return max(bisect_left(time.prefix, quick), bisect_left(need.prefix, small), pin)

    @cached_property
    def infinite(self) -> int:
        return 1 + max(max(time.upto) for time in {slot.time for modes in self.slots for slot in modes})


def slowest(blocks: list[PlacedBlock]) -> int:
    return max(block.time for block in blocks)


def makespan(blocks: list[PlacedBlock], microbatches: int) -> int:
    """The time at which the last micro-batch leaves a pipeline; it is a flow shop of equal jobs.

    Args:
        blocks: those of all stages.
        microbatches: the number of micro-batches, each of which takes a block's time there.

    Returns:
        The time, in units of the problem.
    """
    return sum(block.time for block in blocks) + (microbatches - 1) * slowest(blocks)
