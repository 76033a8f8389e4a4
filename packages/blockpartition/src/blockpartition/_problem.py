"""A placement problem in integers: positions where a cut may be, and the stages that blocks are put on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import add, sub

from ._numbers import Grid, Number, number


@dataclass(frozen=True, eq=False)
class Measure:
    """The time or the memory of blocks: what their layers add up to, and what is needed at their end.

    prefix: for each position the sum of all layers before it.
    leave: what a block needs on top if it ends at a position; None if nothing.
    """

    prefix: list[int]
    leave: list[int] | None = None

    def of(self, start: int, end: int) -> int:
        """What a block needs."""
        total = self.prefix[end] - self.prefix[start]
        return total + self.leave[end] if self.leave else total

    def last_end(self, start: int, limit: int) -> int:
        """The furthest end of layers from `start` within the limit; not beyond `start` if there is none."""
        return bisect_right(self.prefix, self.prefix[start] + limit) - 1

    def first_start(self, end: int, limit: int) -> int:
        """The furthest start of a block up to `end` within the limit; `end` or more if there is none."""
        return bisect_left(self.prefix, self.of(0, end) - limit)

    def heavier(self, limit: int) -> list[int]:
        """The layers that exceed the limit alone, in order of weight: no block within the limit ends with one."""
        if self.alone[self._ranking[-1]] <= limit:
            return []
        return self._ranking[bisect_right(self._ranking, limit, key=self.alone.__getitem__) :]

    @cached_property
    def alone(self) -> list[int]:
        """What each layer needs as a block of its own."""
        layers = map(sub, self.prefix[1:], self.prefix)
        return list(map(add, layers, self.leave[1:]) if self.leave else layers)

    @cached_property
    def _ranking(self) -> list[int]:
        return sorted(range(len(self.alone)), key=self.alone.__getitem__)

    @cached_property
    def most_leave(self) -> int:
        """The most that a block needs at its end."""
        return max(self.leave or [0])


@dataclass(frozen=True, eq=False)
class ModeSlot:
    """A stage in one of its modes: what blocks take there, and need of the room."""

    mode: str | None
    time: Measure
    need: Measure
    room: int

    def first_start(self, end: int, limit: int) -> int:
        """The furthest start of a block up to `end` that fits, and keeps the limit of time."""
        return max(self.time.first_start(end, limit), self.need.first_start(end, self.room))


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

    costs: of the layers, as they were given.
    positions: the layer at which each position lies.
    pins: the positions that have to be cuts, in order.
    slots: for each stage its modes.
    work: for each position the time of the layers before it, at speed 1.
    speeds: for each number of stages, from 0 on, the sum of the speeds of the first, each in its fastest mode.
    unit: how many units of these times are one of the caller's.
    rounded: whether the caller's are floats.
    memory_unit, memory_rounded: the same of memory.
    capacity: of each stage, if all have the same; else None.
    lower_bound: no placement is faster.
    """

    costs: Grid
    positions: list[int]
    pins: list[int]
    slots: list[list[ModeSlot]]
    work: list[int]
    speeds: list[int]
    unit: int
    rounded: bool
    memory_unit: int
    memory_rounded: bool
    capacity: Fraction | None
    microbatches: int | None
    lower_bound: Fraction

    @property
    def n(self) -> int:
        """The last position."""
        return len(self.positions) - 1

    @cached_property
    def next_pin(self) -> list[int]:
        """For each position the furthest end of a block from there."""
        stops = [*self.pins, self.n]
        return [stops[bisect_right(self.pins, p)] for p in range(self.n + 1)]

    @cached_property
    def last_pin(self) -> list[int]:
        """For each position the furthest start of a block up to there."""
        stops = [0, *self.pins]
        return [stops[bisect_left(self.pins, p)] for p in range(self.n + 1)]

    @cached_property
    def endless(self) -> int:
        """A time that every block stays below."""
        times = {slot.time for modes in self.slots for slot in modes}
        return 1 + max(time.prefix[-1] + time.most_leave for time in times)

    def time(self, value: Fraction | int) -> Number:
        """A time of the problem in the caller's unit."""
        return number(value.numerator, value.denominator * self.unit, self.rounded)


def slowest(blocks: list[PlacedBlock]) -> int:
    """The time of the block that takes longest."""
    return max(block.time for block in blocks)


def makespan(blocks: list[PlacedBlock], microbatches: int) -> int:
    """The time at which the last micro-batch leaves a pipeline of these blocks; it is a flow shop of equal jobs."""
    return sum(block.time for block in blocks) + (microbatches - 1) * slowest(blocks)
