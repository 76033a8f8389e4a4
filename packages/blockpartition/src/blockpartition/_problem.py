"""A placement problem in integers: positions where a cut may be, and the stages that blocks are put on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add, sub


@dataclass(frozen=True, eq=False)
class Measure:
    """The time or the memory of blocks: what their layers add up to, and what is needed at their ends.

    prefix: for each position the sum of all layers before it.
    entry: what a block needs on top if it starts at a position; None if nothing. A shorter block may then need more.
    leave: what a block needs on top if it ends at a position; None if nothing. At most one of both is given.
    """

    prefix: list[int]
    entry: list[int] | None = None
    leave: list[int] | None = None

    def of(self, start: int, end: int) -> int:
        """What a block needs."""
        total = self.prefix[end] - self.prefix[start]
        if self.entry:
            return total + self.entry[start]
        return total + self.leave[end] if self.leave else total

    def last_end(self, start: int, limit: int) -> int:
        """The furthest end of layers from `start` within the limit; not beyond `start` if there is none."""
        return bisect_right(self.prefix, self.prefix[start] + limit) - 1

    def first_start(self, end: int, limit: int) -> int:
        """The furthest start of a block up to `end` within the limit, but for its entry; `end` or more if none is."""
        return bisect_left(self.prefix, self.prefix[end] + (self.leave[end] if self.leave else 0) - limit)

    def heavier(self, limit: int) -> list[int]:
        """The layers that no block within the limit can have, in order of weight."""
        if self._ranking and self.lightest[self._ranking[-1]] <= limit:
            return []
        return self._ranking[bisect_right(self._ranking, limit, key=self.lightest.__getitem__) :]

    @cached_property
    def lightest(self) -> list[int]:
        """For each layer the least that a block with it can come to: with an entry, a longer one may come to less."""
        if self.entry:
            return list(map(sub, self.prefix[1:], accumulate(map(sub, self.prefix, self.entry), max)))
        alone = map(sub, self.prefix[1:], self.prefix)
        return list(map(add, alone, self.leave[1:]) if self.leave else alone)

    @cached_property
    def _ranking(self) -> list[int]:
        return sorted(range(len(self.lightest)), key=self.lightest.__getitem__)

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

    slots: for each stage its modes.
    pins: the positions that have to be cuts, in order.
    least: for each position the least time of the layers before it, at speed 1.
    speeds: for each number of stages, from 0 on, the sum of the speeds of the first, each in its fastest mode.
    """

    slots: list[list[ModeSlot]]
    n: int
    pins: list[int]
    least: list[int]
    speeds: list[int]

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
        return 1 + max(time.prefix[-1] + max(time.entry or [0]) + time.most_leave for time in times)


def slowest(blocks: list[PlacedBlock]) -> int:
    """The time of the block that takes longest."""
    return max(block.time for block in blocks)


def makespan(blocks: list[PlacedBlock], microbatches: int) -> int:
    """The time at which the last micro-batch leaves a pipeline of these blocks; it is a flow shop of equal jobs."""
    return sum(block.time for block in blocks) + (microbatches - 1) * slowest(blocks)
