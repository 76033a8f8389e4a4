"""A placement problem in integers: the allowed cut positions and the stages."""

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

    prefix: the sum of all layers before each position.
    upto: the same sum plus the extra cost of a block that ends at the position.
    """

    prefix: list[int]
    upto: list[int]

    def of(self, start: int, end: int) -> int:
        return self.upto[end] - self.prefix[start]

    def last_end(self, start: int, limit: int) -> int:
        """Return the furthest end of layers from `start` within the limit, at most `start` if there is none."""
        return bisect_right(self.prefix, self.prefix[start] + limit) - 1

    def heavier(self, limit: int) -> list[int]:
        """Return the layers that alone exceed the limit, sorted by weight. No block within the limit ends with one."""
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
    """A stage in one of its modes: the time and memory of blocks there, and the available memory (`room`)."""

    mode: str | None
    time: Measure
    need: Measure
    room: int


@dataclass(frozen=True)
class PlacedBlock:
    """A block between two positions, and the slot that runs it."""

    start: int
    end: int
    slot: ModeSlot

    @property
    def time(self) -> int:
        """The time that it keeps its stage busy, including the cut after it."""
        return self.slot.time.of(self.start, self.end)


@dataclass(frozen=True)
class Problem:
    """A placement problem. Positions 0 … n are the allowed cuts, so layers between two of them count as one layer.

    positions: the index of the layer after each position.
    pins: the positions where a block has to end, including 0 and n.
    slots: the modes of each stage.
    work: the time of the layers before each position, at speed 1.
    speeds: prefix sums of the speeds of the stages, each in its fastest mode.
    time, memory: the scales that convert times and memory to the caller's units.
    lower_bound: a lower bound on the slowest block's time.
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
        """Return the earliest start of a block up to `end` that is within the time limit, fits, and crosses no pin.

        The result is `end` or more if there is none.
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
    """Return the time when the last micro-batch leaves the pipeline, a flow shop of equal jobs.

    Args:
        blocks: the blocks of all stages.
        microbatches: the number of micro-batches.

    Returns:
        The time, in units of the problem.
    """
    return sum(block.time for block in blocks) + (microbatches - 1) * slowest(blocks)
