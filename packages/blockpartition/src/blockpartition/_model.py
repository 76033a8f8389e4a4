"""The arguments of `place` together, as a problem in integers and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain, pairwise
from math import lcm
from typing import Any, NamedTuple, TypeAlias

from ._arguments import InFlight, cut_set, in_flight_factors, integer, stage_list, vector
from ._numbers import Grid, Number, counted, joint_kind, kind_of, number, ratio, read
from ._problem import Measure, ModeSlot, Problem
from ._results import Infeasible
from ._stages import Mode, Stage

Amount: TypeAlias = tuple[Grid, Fraction]  # numbers for each layer, and a factor on them


class Option(NamedTuple):
    """One mode of one stage: the time of each layer, and what it keeps, keeps at its cut, and needs for a moment."""

    name: str | None
    time: Amount
    saved: Amount
    boundary: Amount
    transient: Amount


@dataclass(frozen=True)
class Model:
    """The problem, and what turns its answers into the caller's numbers.

    positions: the layer at which each position of the problem lies.
    unit, kind: how many units of the problem's times are one of the caller's, and the type of the caller's.
    memory_unit, memory_kind: the same of memory.
    capacities: of each stage, in the caller's unit.
    lower_bound: no placement is faster, in units of the problem.
    """

    problem: Problem
    costs: Grid
    positions: list[int]
    unit: int
    kind: type
    memory_unit: int
    memory_kind: type
    capacities: list[Fraction | None]
    lower_bound: Fraction
    microbatches: int | None

    def time(self, value: Fraction | int) -> Number:
        """A time of the problem in the caller's unit."""
        return number(value.numerator, value.denominator * self.unit, self.kind)

    def imbalance(self, slowest: int) -> Number:
        """The time of the slowest block, divided by what it would be if layers could be divided."""
        least, speed = self.problem.least[-1], self.problem.speeds[-1]
        return number(slowest * speed, least, float) if least else 1.0


def read_model(
    costs: Iterable[Any],
    stages: int | Iterable[Stage],
    *,
    memory: Iterable[Any] | None = None,
    activations: Iterable[Any] | None = None,
    boundary: Iterable[Any] | None = None,
    in_flight: InFlight | None = None,
    transfer: Iterable[Any] | None = None,
    forbid: Iterable[int] = (),
    pin: Iterable[int] = (),
    microbatches: int | None = None,
) -> Model:
    """The problem that the arguments of `place` describe; TypeError or ValueError names what is wrong with them."""
    work = read(costs)
    n = len(work.units)
    devices = stage_list(stages, n)
    paid, kept = vector(transfer, "transfer", n, after=1), vector(activations, "activations", n)
    crossing, held = vector(boundary, "boundary", n, before=1), vector(memory, "memory", n)
    known: dict[int, list[Option]] = {}  # equal stages are mostly one object, many times
    for j, stage in enumerate(devices):
        if id(stage) not in known:
            known[id(stage)] = _options(stage, f"stage[{j}]", work, kept, crossing)
    every = list(chain(*known.values()))
    times, needs = [x.time for x in every], [y for x in every for y in (x.saved, x.boundary, x.transient)]
    if memory is None and activations is None and boundary is None and {grid for grid, _ in needs} <= {kept, crossing}:
        held = work
    at, pins = _positions(n, len(devices), cut_set(forbid, "forbid", n), cut_set(pin, "pin", n))
    count = None if microbatches is None else integer(microbatches, "microbatches", 1)
    factors = in_flight_factors(in_flight, len(devices), count)
    rooms = [
        None if stage.capacity is None else ratio(stage.capacity, f"capacity of stage[{j}]")
        for j, stage in enumerate(devices)
    ]
    unit = lcm(paid.scale, *_denominators(times))
    memory_unit = lcm(held.scale, *_denominators(needs), *(room.denominator for room in rooms if room is not None))
    options = [known[id(stage)] for stage in devices]
    slots = _slots(options, factors, rooms, _Scales(at, unit, memory_unit, paid, held))
    least, speeds, bound = _floor(options, slots)
    paces = [stage.speed for stage in devices]
    factors_of_time = [x.time for stage in devices for x in stage.modes if not isinstance(x.time, tuple)]
    return Model(
        Problem(slots, len(at) - 1, pins, least, speeds), work, at, unit,
        joint_kind(work.kind, paid.kind, kind_of([*paces, *factors_of_time]), *(grid.kind for grid, _ in times)),
        memory_unit, joint_kind(held.kind, *(x.kind for x, _ in needs), kind_of(x.capacity or 0 for x in devices)),
        rooms, bound, count,
    )  # fmt: skip


def _options(stage: Stage, name: str, costs: Grid, activations: Grid, boundary: Grid) -> list[Option]:
    """The modes of a stage, at least one; TypeError or ValueError names what is wrong with them."""
    speed = ratio(stage.speed, f"speed of {name}")
    if not speed:
        raise ValueError(f"speed of {name} must be positive, got {stage.speed!r}")
    found = []
    for mode in stage.modes or [Mode("")]:
        where = f"of mode {mode.name!r} of {name}"
        grid, factor = _amount(mode.time, f"time {where}", costs)
        if not factor:
            raise ValueError(f"time {where} must be positive, got {mode.time!r}")
        saved, transient = (_amount(getattr(mode, x), f"{x} {where}", activations) for x in ("saved", "transient"))
        crossing = boundary, ratio(mode.boundary, f"boundary {where}")
        found.append(Option(mode.name if stage.modes else None, (grid, factor / speed), saved, crossing, transient))
    return found


def _amount(value: Any, name: str, factor_on: Grid) -> Amount:
    """Values of the layers themselves, or a factor on others."""
    if isinstance(value, tuple):
        return vector(value, name, len(factor_on.units)), Fraction(1)
    return factor_on, ratio(value, name)


def _denominators(amounts: Iterable[Amount]) -> list[int]:
    return [(factor / grid.scale).denominator for grid, factor in amounts]


class _Scales(NamedTuple):
    """Positions, how many units of a problem's times and memory are one of the caller's, and what all modes share."""

    at: list[int]
    unit: int
    memory_unit: int
    transfer: Grid
    memory: Grid


def _slots(
    options: list[list[Option]], factors: list[int], rooms: list[Fraction | None], scales: _Scales
) -> list[list[ModeSlot]]:
    """For each stage its modes, in units of the problem; those that have the same times or needs share them."""
    at, unit, memory_unit, transfer, memory = scales
    inside = [0, *(x * (unit // transfer.scale) for x in transfer.units[:-1]), 0]  # the ends of all are no cuts
    leave = [inside[p] for p in at] if any(inside) else None
    nothing = Measure([0] * len(at))

    @cache
    def sums(grid: Grid) -> list[int]:
        total = list(accumulate(grid.units, initial=0))
        return [total[p] for p in at]

    def total(unit: int, *amounts: Amount) -> list[int]:
        found = [0] * len(at)
        for grid, factor in amounts:
            if times := int(unit * factor / grid.scale):
                found = [a + times * b for a, b in zip(found, sums(grid), strict=True)]
        return found

    @cache
    def time(amount: Amount) -> Measure:
        return Measure(total(unit, amount), None, leave)

    @cache
    def need(saved: Amount, transient: Amount, boundary: Amount, factor: int) -> Measure:
        prefix = total(memory_unit, (memory, Fraction(1)), (saved[0], factor * saved[1]), transient)
        times = int(memory_unit * factor * boundary[1] / boundary[0].scale)
        entry = [times * x for x in map([*boundary[0].units, 0].__getitem__, at)]
        return Measure(prefix, entry if any(entry) else None)

    def slot(option: Option, factor: int, room: Fraction | None) -> ModeSlot:
        if room is None:
            return ModeSlot(option.name, time(option.time), nothing, 0)
        needs = need(option.saved, option.transient, option.boundary, factor)
        return ModeSlot(option.name, time(option.time), needs, int(memory_unit * room))

    each = zip(options, factors, rooms, strict=True)
    return [[slot(option, factor, room) for option in modes] for modes, factor, room in each]


def _floor(options: list[list[Option]], slots: list[list[ModeSlot]]) -> tuple[list[int], list[int], Fraction]:
    """`least` and `speeds` of a problem, both times what makes them integers, and the lower bound that follows."""
    paces = [[1 / option.time[1] for option in modes] for modes in options]
    tick = lcm(*(pace.denominator for pace in chain(*paces)))
    rates = [int(tick * max(modes)) for modes in paces]
    each = zip(chain(*options), chain(*paces), chain(*slots), strict=True)
    # Times multiplied by speeds are costs; of modes with the same costs, one will do.
    costs = {option.time[0]: (int(tick * pace), slot.time.prefix) for option, pace, slot in each}
    layers = [[pace * (b - a) for a, b in pairwise(prefix)] for pace, prefix in costs.values()]
    lightest = list(map(min, zip(*layers, strict=True)))
    least, speeds = list(accumulate(lightest, initial=0)), list(accumulate(rates, initial=0))
    return least, speeds, max(Fraction(least[-1], speeds[-1]), Fraction(max(lightest), max(rates)))


def _positions(layers: int, stages: int, forbid: frozenset[int], pin: frozenset[int]) -> tuple[list[int], list[int]]:
    """The layers before which a cut may be, and which of these positions have to be cut."""
    if forbid & pin:
        raise ValueError(f"cuts {sorted(forbid & pin)} are both pinned and forbidden")
    positions = [p for p in range(layers + 1) if p not in forbid]
    if len(positions) - 1 < stages:
        blocks = counted(len(positions) - 1, "block")
        raise Infeasible(f"the forbidden cuts leave {blocks} for {counted(stages, 'stage')}")
    if len(pin) >= stages:
        raise Infeasible(f"the pinned cuts make {counted(len(pin) + 1, 'block')} for {counted(stages, 'stage')}")
    return positions, [i for i, p in enumerate(positions) if p in pin]
