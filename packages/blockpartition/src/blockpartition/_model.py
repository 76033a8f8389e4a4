"""The arguments of `place` together, as a problem in integers and the way back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from ._arguments import (
    InFlight,
    boundaries,
    choice,
    cut_set,
    in_flight_factors,
    integer,
    speeds,
    stage_list,
    switch,
    transfers,
    vector,
)
from ._bottleneck import Chosen
from ._counted import counted
from ._grid import Grid, Number, join, joint_kind, number, read
from ._infeasible import Infeasible
from ._lattice import chain, lattice
from ._measure import Measure, measure_at
from ._modes import Option, read_options
from ._needs import Needs, read_needs
from ._problem import Problem, Slot
from ._stages import Stage


@dataclass(frozen=True)
class Model:
    """The problem, and what turns its answers into the caller's numbers.

    positions: the layer at which each position of the problem lies.
    kinds: for each stage the number its slots bear; equal stages of a free order share one.
    options: for each stage its modes.
    """

    costs: Grid
    stages: list[Stage]
    options: list[list[Option]]
    problem: Problem
    positions: list[int]
    kinds: list[int]
    needs: Needs
    scale: int
    kind: type
    microbatches: int | None

    def time(self, value: Fraction) -> Number:
        """A time of the problem in the caller's unit."""
        return number(value.numerator, value.denominator * self.scale, self.kind)

    def memory(self, value: int) -> Number:
        """A need of the problem in the caller's unit."""
        return number(value, self.needs.scale, self.needs.kind)

    @property
    def mean_time(self) -> Fraction:
        """How long each stage would take if layers could be divided, each layer and stage in its fastest mode."""
        return self.problem.floor

    @property
    def heaviest_time(self) -> Fraction:
        """How long the heaviest layer takes on the fastest stage."""
        fastest = max(slot.speed for slot in self.problem.slots)
        return Fraction(max(self.problem.least_work), fastest)

    def stages_of(self, blocks: list[Chosen]) -> tuple[int, ...]:
        """The stage of each block: of equal stages the earlier first."""
        unused = {kind: iter([j for j, other in enumerate(self.kinds) if other == kind]) for kind in self.kinds}
        return tuple(next(unused[block.slot.stage]) for block in blocks)

    def modes_of(self, blocks: list[Chosen]) -> tuple[str | None, ...]:
        """The name of the mode of each block; None on a stage without modes."""
        return tuple(self.options[block.slot.stage][block.slot.mode].name for block in blocks)


def read_model(
    costs: Iterable[Any],
    stages: int | Iterable[Stage],
    *,
    memory: Iterable[Any] | None = None,
    activations: Iterable[Any] | None = None,
    boundary: Iterable[Any] | None = None,
    in_flight: InFlight | None = None,
    transfer: Iterable[Any] | None = None,
    overlap: bool = False,
    forbid: Iterable[int] = (),
    pin: Iterable[int] = (),
    order: Literal["fixed", "free"] = "fixed",
    microbatches: int | None = None,
) -> Model:
    """The problem that the arguments of `place` describe; TypeError or ValueError names what is wrong with them."""
    work = read(costs)
    n = len(work.units)
    devices = stage_list(stages, n)
    count = None if microbatches is None else integer(microbatches, "microbatches", 1)
    paces, cut_costs = speeds(devices), transfers(transfer, n)
    options = read_options(devices, paces, n)
    positions, pins = _positions(n, len(devices), cut_set(forbid, "forbid", n), cut_set(pin, "pin", n))
    slots_of, paid, scale = _works(work, cut_costs, options, positions)
    alone = memory is None and activations is None and boundary is None and not _own_memory(options)
    needs = read_needs(
        work if alone else vector(memory, "memory", n), vector(activations, "activations", n),
        boundaries(boundary, n), devices, options, positions,
    )  # fmt: skip
    factors = in_flight_factors(in_flight, len(devices), count)
    free = choice(order, "order", ["fixed", "free"]) == "free"
    kinds = [devices.index(stage) for stage in devices] if free else list(range(len(devices)))

    def slots(stage: int, place: int) -> list[Slot]:
        return [
            Slot(stage, time, speed, *needs.on(stage, factors[place], option), mode)
            for mode, (option, (time, speed)) in enumerate(zip(options[stage], slots_of[stage], strict=True))
        ]

    sets = lattice(kinds, slots) if free else chain(len(devices), slots)
    problem = Problem(sets.into, sets.depth, len(positions) - 1, paid, switch(overlap, "overlap"), pins)
    kind = joint_kind(work.kind, cut_costs.kind, paces.kind, *(option.kind for some in options for option in some))
    return Model(work, devices, options, problem, positions, kinds, needs, scale, kind, count)


def _works(
    costs: Grid, transfer: Grid, options: list[list[Option]], positions: list[int]
) -> tuple[list[list[tuple[Measure, int]]], list[int] | None, int]:
    """For each stage the work and the speed of each mode, the costs of cuts, and the unit of all times."""
    every = [option for some in options for option in some]
    own = {id(option.costs): option.costs for option in every if option.costs is not None}
    (units, paid, *others), scale = join(costs, transfer, *own.values())
    pace = math.lcm(*{option.pace.denominator for option in every})
    measures = {
        name: measure_at(positions, [unit * pace for unit in mine])
        for name, mine in zip([id(None), *own], [units, *others], strict=True)
    }
    works = [[(measures[id(option.costs)], int(option.pace * pace)) for option in some] for some in options]
    return works, _at_cuts(positions, paid), scale


def _own_memory(options: list[list[Option]]) -> bool:
    """Whether a mode says what it needs for each layer."""
    return any(isinstance(x, Grid) for some in options for option in some for x in (option.saved, option.transient))


def _positions(
    layers: int, stages: int, forbid: frozenset[int], pin: frozenset[int]
) -> tuple[list[int], frozenset[int]]:
    """The layers before which a cut may be, and which of these positions have to be cut."""
    if forbid & pin:
        raise ValueError(f"cuts {sorted(forbid & pin)} are both pinned and forbidden")
    positions = [p for p in range(layers + 1) if p not in forbid]
    if len(positions) - 1 < stages:
        raise Infeasible(
            f"the forbidden cuts leave {counted(len(positions) - 1, 'block')}, which cannot fill {stages} stages"
        )
    if len(pin) >= stages:
        make, are = "makes" if len(pin) == 1 else "make", "is" if stages == 1 else "are"
        raise Infeasible(
            f"{counted(len(pin), 'pinned cut')} {make} {len(pin) + 1} blocks, "
            f"and there {are} {counted(stages, 'stage')}"
        )
    return positions, frozenset(i for i, p in enumerate(positions) if p in pin)


def _at_cuts(positions: list[int], paid: list[int]) -> list[int] | None:
    """The cost of cutting at each position: that of the layer before it. The ends of the pipeline are no cuts."""
    inside = [0, *paid[:-1], 0]
    return [inside[p] for p in positions] if any(inside) else None
