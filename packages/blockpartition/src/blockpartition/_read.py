"""The arguments of `place` together, as a problem in integers."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain, pairwise
from math import lcm
from typing import Any, NamedTuple

from ._arguments import InFlight, choice, cut_set, in_flight_factors, integer, stage_list, vector
from ._numbers import Grid, has_floats, ratio, read
from ._problem import Measure, ModeSlot, Problem
from ._results import Infeasible
from ._stages import Mode, Stage


def read_problem(
    costs: Iterable[Any],
    stages: int | Iterable[Stage],
    *,
    memory: Iterable[Any] | None = None,
    activations: Iterable[Any] | None = None,
    in_flight: InFlight | None = None,
    transfer: Iterable[Any] | None = None,
    forbid: Iterable[int] = (),
    pin: Iterable[int] = (),
    microbatches: int | None = None,
    objective: str = "bottleneck",
) -> Problem:
    """The problem that the arguments of `place` describe; TypeError or ValueError names what is wrong with them."""
    work = read(costs)
    n = len(work.units)
    devices = stage_list(stages, n)
    paid, kept = vector(transfer, "transfer", n, after=1), vector(activations, "activations", n)
    held = work if memory is None and activations is None else vector(memory, "memory", n)
    at, pins = _positions(n, len(devices), cut_set(forbid, "forbid", n), cut_set(pin, "pin", n))
    count = None if microbatches is None else integer(microbatches, "microbatches", 1)
    if choice(objective, "objective", ["bottleneck", "makespan"]) == "makespan" and count is None:
        raise ValueError("objective='makespan' depends on how many micro-batches there are: pass microbatches=…")
    known: dict[int, list[Terms]] = {}  # equal stages are mostly one object, many times
    for j, stage in enumerate(devices):
        if id(stage) not in known:
            known[id(stage)] = _terms(stage, f"stage[{j}]")
    options = [known[id(stage)] for stage in devices]
    factors = in_flight_factors(in_flight, len(devices), count)

    # The least units in which all times, and all amounts of memory, are integers.
    every = list(chain(*options))
    rooms = [option.room for option in every if option.room is not None]
    unit = lcm(paid.scale, *{(option.pace / work.scale).denominator for option in every})
    shares = {term / kept.scale for option in every for term in (option.saved, option.transient)}
    memory_unit = lcm(held.scale, *{share.denominator for share in shares}, *{room.denominator for room in rooms})

    def sums(grid: Grid) -> list[int]:
        """For each position the sum of all layers before it."""
        before = list(accumulate(grid.units, initial=0))
        return [before[p] for p in at]

    inside = [0, *(x * (unit // paid.scale) for x in paid.units[:-1]), 0]  # the ends of all are no cuts
    leave = [inside[p] for p in at] if any(inside) else None

    costs_before, held_before, kept_before = sums(work), sums(held), sums(kept)

    # Equal stages share what is as long as the layers.
    @cache
    def time(pace: Fraction) -> Measure:
        times = int(unit * pace / work.scale)
        return Measure([times * x for x in costs_before], leave)

    @cache
    def need(share: Fraction | None) -> Measure:
        if share is None:
            return Measure([0] * len(at))
        once, times = memory_unit // held.scale, int(memory_unit * share / kept.scale)
        return Measure([once * x + times * y for x, y in zip(held_before, kept_before, strict=True)])

    # Where any amount fits, nothing is needed, so a room of 0 is enough.
    def slot(option: Terms, factor: int) -> ModeSlot:
        share = None if option.room is None else factor * option.saved + option.transient
        return ModeSlot(option.name, time(option.pace), need(share), int(memory_unit * (option.room or 0)))

    # Bounds count each stage in its fastest mode. Times multiplied by `tick` make all speeds integers.
    paces = [min(option.pace for option in modes) for modes in options]
    tick = lcm(*{pace.numerator for pace in paces})
    speeds = list(accumulate((int(tick / pace) for pace in paces), initial=0))
    layers = [tick * unit // work.scale * x for x in costs_before]
    heaviest = Fraction(max(b - a for a, b in pairwise(layers)), int(tick / min(paces)))
    alike = len({stage.capacity for stage in devices}) == 1
    return Problem(
        costs=work,
        positions=at,
        pins=pins,
        slots=[[slot(option, factor) for option in modes] for modes, factor in zip(options, factors, strict=True)],
        work=layers,
        speeds=speeds,
        unit=unit,
        rounded=work.rounded or paid.rounded or any(option.rounded for option in every),
        memory_unit=memory_unit,
        memory_rounded=held.rounded or kept.rounded or has_floats(stage.capacity or 0 for stage in devices),
        capacity=options[0][0].room if alike else None,
        microbatches=count,
        lower_bound=max(Fraction(layers[-1], speeds[-1]), heaviest),
    )


class Terms(NamedTuple):
    """What a stage is like in one of its modes: the time of a unit of costs, and the factors on activations."""

    name: str | None
    pace: Fraction
    saved: Fraction
    transient: Fraction
    room: Fraction | None
    rounded: bool


def _terms(stage: Stage, name: str) -> list[Terms]:
    """The modes of a stage, at least one; TypeError or ValueError names what is wrong with them."""
    speed = _positive(stage.speed, f"speed of {name}")
    room = None if stage.capacity is None else ratio(stage.capacity, f"capacity of {name}")
    found = []
    for mode in stage.modes or [Mode("")]:
        where = f"of mode {mode.name!r} of {name}"
        pace = _positive(mode.time, f"time {where}") / speed
        saved, transient = (ratio(getattr(mode, x), f"{x} {where}") for x in ("saved", "transient"))
        rounded = has_floats([stage.speed, mode.time])
        found.append(Terms(mode.name if stage.modes else None, pace, saved, transient, room, rounded))
    return found


def _positive(value: Any, name: str) -> Fraction:
    exact = ratio(value, name)
    if not exact:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return exact


def _positions(layers: int, stages: int, forbid: frozenset[int], pin: frozenset[int]) -> tuple[list[int], list[int]]:
    """The layers before which a cut may be, and which of these positions have to be cut."""
    if forbid & pin:
        raise ValueError(f"cuts {sorted(forbid & pin)} are both pinned and forbidden")
    positions = [p for p in range(layers + 1) if p not in forbid]
    if len(positions) - 1 < stages:
        raise Infeasible(f"the forbidden cuts leave blocks for {len(positions) - 1} of {stages} stages")
    if len(pin) >= stages:
        raise Infeasible(f"the pinned cuts make {len(pin) + 1} blocks, more than the {stages} stages")
    return positions, [i for i, p in enumerate(positions) if p in pin]
