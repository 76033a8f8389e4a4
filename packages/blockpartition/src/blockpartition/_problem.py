"""A placement problem in integers: positions where a cut may be, and the stages a block may be put on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from operator import sub

from ._measure import Measure
from ._paid import Paid, read_paid


@dataclass(frozen=True)
class Bound:
    """A limit on the time of every block, which may be reached or, if strict, may not."""

    value: Fraction
    strict: bool = False

    def limit(self, speed: int) -> int:
        """The most work a stage of this speed may have."""
        return (self.value.numerator * speed - self.strict) // self.value.denominator


@dataclass(frozen=True)
class Slot:
    """A stage at its place in the pipeline, in one of its modes: a block takes work/speed and has to fit into the room.

    At most one of work and need has an entry.
    """

    stage: int
    work: Measure
    speed: int
    need: Measure
    room: int
    mode: int = 0

    @cached_property
    def misfits(self) -> list[int]:
        """Layers that do not fit into the room, with whatever other layers."""
        return self.need.heavier(self.room)

    def fits(self, start: int, end: int) -> bool:
        """Whether a block fits into the room."""
        return self.need.of(start, end) <= self.room


@dataclass(frozen=True)
class Step:
    """One more block: from a set of used stages to a larger one, on the stage that makes the difference."""

    before: int
    slot: Slot


@dataclass(frozen=True)
class Problem:
    """Positions 0 … n are the possible cuts: layers kept together by forbidden cuts are one layer here.

    into: for each set of used stages the steps that lead there; the first is empty, the last holds all stages.
    depth: how many stages each set has. In a fixed order there is one set of each depth.
    transfer: cost of a cut at each position, paid by the stage before it; None if all are zero.
    overlap: whether a stage transfers while it computes, so that the longer of the two counts.
    """

    into: list[list[Step]]
    depth: list[int]
    n: int
    transfer: list[int] | None
    overlap: bool
    pins: frozenset[int]

    @cached_property
    def next_pin(self) -> list[int]:
        """For each position the furthest end of a block from there."""
        nearest, found = self.n, [self.n]
        for position in range(self.n - 1, -1, -1):
            found.append(nearest)
            nearest = position if position in self.pins else nearest
        return found[::-1]

    @cached_property
    def last_pin(self) -> list[int]:
        """For each position the furthest start of a block up to there."""
        nearest, found = 0, [0]
        for position in range(1, self.n + 1):
            found.append(nearest)
            nearest = position if position in self.pins else nearest
        return found

    @cached_property
    def speeds(self) -> list[int]:
        """For each set of used stages the sum of their speeds, each in its fastest mode."""
        sums = [0]
        for steps in self.into[1:]:
            before = steps[0].before
            sums.append(sums[before] + max(step.slot.speed for step in steps if step.before == before))
        return sums

    @cached_property
    def slots(self) -> list[Slot]:
        """Every slot of every step, some of them many times."""
        return [step.slot for steps in self.into for step in steps]

    @cached_property
    def unbounded(self) -> Bound:
        """A bound that every block keeps."""
        works = {id(slot.work): slot.work for slot in self.slots}.values()
        heaviest = max(work.prefix[-1] + max(work.entry or [0]) for work in works)
        return Bound(Fraction(heaviest + max(self.transfer or [0]) + 1))

    @cached_property
    def floor(self) -> Fraction:
        """No placement is faster than if layers could be divided, each and each stage in its fastest mode."""
        return Fraction(sum(self.least_work), self.speeds[-1]) if self.speeds[-1] else Fraction(0)

    @cached_property
    def least_work(self) -> list[int]:
        """For each layer the least work among all modes."""
        works = list({id(slot.work): slot.work for slot in self.slots}.values())
        weights = [list(map(sub, work.prefix[1:], work.prefix)) for work in works]
        return weights[0] if len(weights) == 1 else list(map(min, *weights))

    @cached_property
    def least_sums(self) -> list[int]:
        """For each position the least work of the layers before it."""
        return list(accumulate(self.least_work, initial=0))

    @cached_property
    def paid(self) -> Callable[[Slot], Paid]:
        """What the costs of cuts do to the reach of a slot; slots with the same work and speed share it."""
        known: dict[tuple[int, int], Paid] = {}

        def find(slot: Slot) -> Paid:
            key = id(slot.work), slot.speed
            if key not in known:
                extra = [self.transfer_work(end, slot) for end in range(self.n + 1)]
                known[key] = read_paid(slot.work, extra, self.overlap)
            return known[key]

        return find

    def last_position(self, state: int) -> int:
        """The last end after which every remaining stage still finds a layer."""
        return self.n - (self.depth[-1] - self.depth[state])

    def transfer_work(self, end: int, slot: Slot) -> int:
        """The cost of the cut as work that would take this stage as long."""
        return self.transfer[end] * slot.speed if self.transfer else 0

    def first_start(self, end: int, slot: Slot, limit: int) -> int:
        """The furthest start of a block up to `end`; `end` or beyond if there is none. With an entry, at least this."""
        extra = self.transfer_work(end, slot)
        if self.overlap:
            limit, extra = (limit if extra <= limit else -1), 0
        return max(
            slot.work.first_start(end, limit - extra),
            slot.need.first_start(end, slot.room),
            self.last_pin[end],
        )

    def occupied(self, start: int, end: int, slot: Slot) -> int:
        """The work of a block on this stage, its transfer included."""
        work, extra = slot.work.of(start, end), self.transfer_work(end, slot)
        return max(work, extra) if self.overlap else work + extra

    def time(self, start: int, end: int, slot: Slot) -> Fraction:
        """How long a block keeps its stage busy; no work takes no time, even where there is no speed."""
        work = self.occupied(start, end, slot)
        return Fraction(work, slot.speed) if work else Fraction(0)
