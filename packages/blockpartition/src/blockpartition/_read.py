"""Validate the arguments of `place` and convert them to an integer problem."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
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
    """Validate the arguments of `place` and build the problem that they describe."""
    work = read(costs)
    n = len(work.units)
    devices = stage_list(stages, n)
    paid, kept = vector(transfer, "transfer", n, after=1), vector(activations, "activations", n)
    held = work if memory is None and activations is None else vector(memory, "memory", n)
    at, pins = _positions(n, len(devices), cut_set(forbid, "forbid", n), cut_set(pin, "pin", n))
    count = None if microbatches is None else integer(microbatches, "microbatches", 1)
    if choice(objective, "objective", ["bottleneck", "makespan"]) == "makespan" and count is None:
        raise ValueError("objective='makespan' depends on how many micro-batches there are: pass microbatches=…")
    places = {id(stage): j for j, stage in enumerate(devices)}  # equal stages are usually the same object
    known = {key: _terms(devices[j], f"stage[{j}]") for key, j in places.items()}
    options = [known[id(stage)] for stage in devices]
    factors = in_flight_factors(in_flight, len(devices), count)
    measures = _Measures(at, work, paid, held, kept, list(chain(*known.values())))
    # Bounds assume that each stage is in its fastest mode. Multiplying times by `tick` makes all speeds integers.
    paces = [min(option.pace for option in modes) for modes in options]
    tick = lcm(*{pace.numerator for pace in paces})
    speeds = list(accumulate((int(tick / pace) for pace in paces), initial=0))
    layers, largest = [tick * x for x in measures.work], max(b - a for a, b in pairwise(measures.work))
    paced = chain(*((stage.speed, *(mode.time for mode in stage.modes)) for stage in devices))
    rooms = (stage.capacity or 0 for stage in devices)
    return Problem(
        costs=work,
        positions=at,
        pins=pins,
        slots=[[measures.slot(each, factor) for each in modes] for modes, factor in zip(options, factors, strict=True)],
        work=layers,
        speeds=speeds,
        time=Scale(measures.time_unit, work.rounded or paid.rounded or has_floats(paced)),
        memory=Scale(measures.memory_unit, held.rounded or kept.rounded or has_floats(rooms)),
        microbatches=count,
        lower_bound=max(Fraction(layers[-1], speeds[-1]), largest * min(paces)),
    )


class Terms(NamedTuple):
    """A stage in one of its modes: the time per unit of cost, the factors on activations, and the capacity."""

    name: str | None
    pace: Fraction
    saved: Fraction
    transient: Fraction
    room: Fraction | None


class _Measures:
    """The times and memory of blocks as integers. Equal stages share the lists per layer.

    time_unit, memory_unit: the number of integer units per caller's unit, the smallest that avoids rounding.
    work: the time of the layers before each position, at speed 1.
    """

    def __init__(self, at: list[int], work: Grid, paid: Grid, held: Grid, kept: Grid, terms: list[Terms]) -> None:
        self._shares = lcm(*{share.denominator for term in terms for share in (term.saved, term.transient)})
        self.time_unit = lcm(paid.scale, work.scale * lcm(*{term.pace.denominator for term in terms}))
        self.memory_unit = lcm(held.scale, kept.scale * self._shares, *{(term.room or 0).denominator for term in terms})
        self.work = _sums(work, at, self.time_unit)
        self._held, self._kept = _sums(held, at, self.memory_unit), _sums(kept, at, self.memory_unit // self._shares)
        # The first and the last position are not cuts.
        self._leave = [0, *(self.time_unit // paid.scale * paid.units[p - 1] for p in at[1:-1]), 0]
        self._times = {pace: self._time(pace) for pace in {term.pace for term in terms}}
        self._needs = dict[Fraction, Measure]()

    def slot(self, option: Terms, factor: int) -> ModeSlot:
        share = factor * option.saved + option.transient
        if share not in self._needs:
            times = int(share * self._shares)
            prefix = [x + times * y for x, y in zip(self._held, self._kept, strict=True)]
            self._needs[share] = Measure(prefix, prefix)
        need = self._needs[share]
        # Without a capacity, everything fits.
        room = need.prefix[-1] if option.room is None else int(self.memory_unit * option.room)
        return ModeSlot(option.name, self._times[option.pace], need, room)

    def _time(self, pace: Fraction) -> Measure:
        prefix = [x // pace.denominator * pace.numerator for x in self.work]
        return Measure(prefix, list(map(add, prefix, self._leave)))


def _sums(grid: Grid, at: list[int], unit: int) -> list[int]:
    """Return the sum of all layers before each position, in integers of which `unit` make one caller's unit."""
    before = [unit // grid.scale * x for x in accumulate(grid.units, initial=0)]
    return [before[p] for p in at]


def _terms(stage: Stage, name: str) -> list[Terms]:
    """Validate and convert the modes of a stage, or its default mode."""
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
    """Return the allowed cuts, including both ends of the sequence, and the indices of the required ones."""
    if forbid & pin:
        raise ValueError(f"cuts {sorted(forbid & pin)} are both pinned and forbidden")
    positions = [p for p in range(layers + 1) if p not in forbid]
    if len(positions) - 1 < stages:
        raise Infeasible(f"the allowed cuts make at most {len(positions) - 1} blocks for {stages} stages")
    if len(pin) >= stages:
        raise Infeasible(f"the pinned cuts make at least {len(pin) + 1} blocks for {stages} stages")
    return positions, [i for i, p in enumerate(positions) if p in pin or p in (0, layers)]
