"""The arguments of `place` together, as a problem in integers."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain, pairwise
from math import lcm
from operator import add
from typing import Any, NamedTuple

from ._arguments import InFlight, choice, cut_set, in_flight_factors, integer, stage_list, vector
from ._numbers import Grid, Scale, has_floats, ratio, read
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
    """The problem that the arguments of `place` describe, checked."""
    work = read(costs)
    n = len(work.units)
    devices = stage_list(stages, n)
    paid, kept = vector(transfer, "transfer", n, after=1), vector(activations, "activations", n)
    held = work if memory is None and activations is None else vector(memory, "memory", n)
    at, pins = _positions(n, len(devices), cut_set(forbid, "forbid", n), cut_set(pin, "pin", n))
    count = None if microbatches is None else integer(microbatches, "microbatches", 1)
    if choice(objective, "objective", ["bottleneck", "makespan"]) == "makespan" and count is None:
        raise ValueError("objective='makespan' depends on how many micro-batches there are: pass microbatches=…")
    places = {id(stage): j for j, stage in enumerate(devices)}  # equal stages are mostly one object, many times
    known = {key: _terms(devices[j], f"stage[{j}]") for key, j in places.items()}
    options = [known[id(stage)] for stage in devices]
    factors = in_flight_factors(in_flight, len(devices), count)

    # The least units in which all times, and all amounts of memory, are integers.
    every = list(chain(*known.values()))
    unit = lcm(paid.scale, work.scale * lcm(*{option.pace.denominator for option in every}))
    shares = lcm(*{term.denominator for option in every for term in (option.saved, option.transient)})
    room_unit = lcm(held.scale, kept.scale * shares, *{(option.room or 0).denominator for option in every})

    def sums(grid: Grid, unit: int) -> list[int]:
        """For each position the sum of all layers before it, in units of which so many are one of the caller's."""
        before = [unit // grid.scale * x for x in accumulate(grid.units, initial=0)]
        return [before[p] for p in at]

    work_at, held_at, kept_at = sums(work, unit), sums(held, room_unit), sums(kept, room_unit // shares)
    leave = [0, *(unit // paid.scale * paid.units[p - 1] for p in at[1:-1]), 0]  # the ends of all are no cuts

    # Equal stages share what is as long as the layers.
    @cache
    def time(pace: Fraction) -> Measure:
        prefix = [x // pace.denominator * pace.numerator for x in work_at]
        return Measure(prefix, list(map(add, prefix, leave)))

    @cache
    def need(share: Fraction) -> Measure:
        times = int(share * shares)
        prefix = [x + times * y for x, y in zip(held_at, kept_at, strict=True)]
        return Measure(prefix, prefix)

    def slot(option: Terms, factor: int) -> ModeSlot:
        needed = need(factor * option.saved + option.transient)
        # Without a capacity there is room for everything.
        room = needed.prefix[-1] if option.room is None else int(room_unit * option.room)
        return ModeSlot(option.name, time(option.pace), needed, room)

    # Bounds count each stage in its fastest mode. Times multiplied by `tick` make all speeds integers.
    paces = [min(option.pace for option in modes) for modes in options]
    tick = lcm(*{pace.numerator for pace in paces})
    speeds = list(accumulate((int(tick / pace) for pace in paces), initial=0))
    layers = [tick * x for x in work_at]
    paced = chain(*((stage.speed, *(mode.time for mode in stage.modes)) for stage in devices))
    return Problem(
        costs=work,
        positions=at,
        pins=pins,
        slots=[[slot(option, factor) for option in modes] for modes, factor in zip(options, factors, strict=True)],
        work=layers,
        speeds=speeds,
        time=Scale(unit, work.rounded or paid.rounded or has_floats(paced)),
        memory=Scale(room_unit, held.rounded or kept.rounded or has_floats(stage.capacity or 0 for stage in devices)),
        microbatches=count,
        lower_bound=max(Fraction(layers[-1], speeds[-1]), max(b - a for a, b in pairwise(work_at)) * min(paces)),
    )


class Terms(NamedTuple):
    """A stage in one of its modes: the time of a unit of costs, and the factors on activations."""

    name: str | None
    pace: Fraction
    saved: Fraction
    transient: Fraction
    room: Fraction | None


def _terms(stage: Stage, name: str) -> list[Terms]:
    """The modes of a stage, at least one, checked."""
    speed = _positive(stage.speed, f"speed of {name}")
    room = None if stage.capacity is None else ratio(stage.capacity, f"capacity of {name}")
    found = []
    for mode in stage.modes or [Mode("")]:
        where = f"of mode {mode.name!r} of {name}"
        pace = _positive(mode.time, f"time {where}") / speed
        saved, transient = (ratio(getattr(mode, x), f"{x} {where}") for x in ("saved", "transient"))
        found.append(Terms(mode.name if stage.modes else None, pace, saved, transient, room))
    return found


def _positive(value: Any, name: str) -> Fraction:
    exact = ratio(value, name)
    if not exact:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return exact


def _positions(layers: int, stages: int, forbid: frozenset[int], pin: frozenset[int]) -> tuple[list[int], list[int]]:
    """The layers before which a cut may be, and at which of these positions a block has to end."""
    if forbid & pin:
        raise ValueError(f"cuts {sorted(forbid & pin)} are both pinned and forbidden")
    positions = [p for p in range(layers + 1) if p not in forbid]
    if len(positions) - 1 < stages:
        raise Infeasible(f"the forbidden cuts leave blocks for {len(positions) - 1} of {stages} stages")
    if len(pin) >= stages:
        raise Infeasible(f"the pinned cuts make {len(pin) + 1} blocks, more than the {stages} stages")
    return positions, [i for i, p in enumerate(positions) if p in pin or p in (0, layers)]
