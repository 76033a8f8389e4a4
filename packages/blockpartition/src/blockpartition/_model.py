"""The arguments of `place` together, as a problem in integers and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from ._arguments import (
    InFlight,
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
from ._grid import Grid, Number, join, joint_kind, number, read
from ._infeasible import Infeasible
from ._lattice import chain, lattice
from ._measure import Measure, measure_at
from ._needs import Needs, read_needs
from ._problem import Problem, Slot
from ._stages import Stage


@dataclass(frozen=True)
class Model:
    """The problem, and what turns its answers into the caller's numbers.

    positions: the layer at which each position of the problem lies.
    kinds: for each stage the number its slots bear; equal stages of a free order share one.
    """

    costs: Grid
    stages: list[Stage]
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
        """How long each stage would take if layers could be divided."""
        return Fraction(self._work.prefix[-1], self.problem.speeds[-1])

    @property
    def heaviest_time(self) -> Fraction:
        """How long the heaviest layer takes on the fastest stage."""
        fastest = max(step.slot.speed for steps in self.problem.into for step in steps)
        return Fraction(max(self._work.of(p, p + 1) for p in range(self.problem.n)), fastest)

    @property
    def _work(self) -> Measure:
        return self.problem.into[-1][0].slot.work

    def stages_of(self, blocks: list[Chosen]) -> tuple[int, ...]:
        """The stage of each block: of equal stages the earlier first."""
        unused = {kind: iter([j for j, other in enumerate(self.kinds) if other == kind]) for kind in self.kinds}
        return tuple(next(unused[block.slot.stage]) for block in blocks)


def read_model(
    costs: Iterable[Any],
    stages: int | Iterable[Stage],
    *,
    memory: Iterable[Any] | None = None,
    activations: Iterable[Any] | None = None,
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
    (units, paid), scale = join(work, cut_costs)
    positions, pins = _positions(n, len(devices), cut_set(forbid, "forbid", n), cut_set(pin, "pin", n))
    time = measure_at(positions, [unit * paces.scale for unit in units])
    held = work if memory is None and activations is None else vector(memory, "memory", n)
    needs = read_needs(held, vector(activations, "activations", n), devices, positions)
    factors = in_flight_factors(in_flight, len(devices), count)
    free = choice(order, "order", ["fixed", "free"]) == "free"
    kinds = [devices.index(stage) for stage in devices] if free else list(range(len(devices)))

    def slot(stage: int, place: int) -> Slot:
        return Slot(stage, time, paces.units[stage], *needs.on(stage, factors[place]))

    sets = lattice(kinds, slot) if free else chain(len(devices), slot)
    problem = Problem(
        sets.into, sets.depth, len(positions) - 1, _at_cuts(positions, paid), switch(overlap, "overlap"), pins
    )
    kind = joint_kind(work, cut_costs, paces)
    return Model(work, devices, problem, positions, kinds, needs, scale, kind, count)


def _positions(
    layers: int, stages: int, forbid: frozenset[int], pin: frozenset[int]
) -> tuple[list[int], frozenset[int]]:
    """The layers before which a cut may be, and which of these positions have to be cut."""
    if forbid & pin:
        raise ValueError(f"cuts {sorted(forbid & pin)} are both pinned and forbidden")
    positions = [p for p in range(layers + 1) if p not in forbid]
    if len(positions) - 1 < stages:
        raise Infeasible(f"the forbidden cuts leave {len(positions) - 1} blocks, which cannot fill {stages} stages")
    if len(pin) >= stages:
        raise Infeasible(f"{len(pin)} pinned cuts make {len(pin) + 1} blocks, and there are {stages} stages")
    return positions, frozenset(i for i, p in enumerate(positions) if p in pin)


def _at_cuts(positions: list[int], paid: list[int]) -> list[int] | None:
    """The cost of cutting at each position: that of the layer before it. The ends of the pipeline are no cuts."""
    inside = [0, *paid[:-1], 0]
    return [inside[p] for p in positions] if any(inside) else None
