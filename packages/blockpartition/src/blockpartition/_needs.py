"""The memory that layers need and stages have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from operator import add
from typing import TypeAlias

from ._grid import Grid, join, joint_kind, read
from ._measure import Measure, measure_at
from ._modes import Option
from ._stages import Stage

Terms: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Needs:
    """What blocks need in each mode, and the room on each stage; None is endless.

    parts: sums at the positions of the problem: of memory, of activations, and of what modes give for each layer.
    boundary: for each position what crosses a cut there.
    own: which part a grid of a mode is, by its id.
    unit: the common denominator of all factors of modes; every need and room is multiplied by it.
    """

    parts: list[list[int]]
    boundary: list[int]
    own: dict[int, int]
    unit: int
    rooms: list[int | None]
    scale: int
    kind: type

    def on(self, stage: int, factor: int, option: Option) -> tuple[Measure, int]:
        """What a stage that holds so many micro-batches in this mode has to hold, and its room."""
        room = self.rooms[stage]
        if room is None:
            return self._measure(((0, 0),), 0), 0
        terms = ((0, self.unit), self._term(option.saved, factor), self._term(option.transient, 1))
        return self._measure(terms, int(factor * option.boundary * self.unit)), room

    def _term(self, amount: Fraction | Grid, factor: int) -> tuple[int, int]:
        """A part and how often it counts."""
        if isinstance(amount, Grid):
            return self.own[id(amount)], factor * self.unit
        return 1, int(amount * factor * self.unit)

    @cached_property
    def _measure(self) -> Callable[[Terms, int], Measure]:
        @cache  # stages share a few factors, and with them the ranking of the layers
        def measure(terms: Terms, crossing: int) -> Measure:
            sums: list[int] = []
            for part, times in terms:
                if times:
                    more = self.parts[part] if times == 1 else [times * x for x in self.parts[part]]
                    sums = list(map(add, sums, more)) if sums else more
            held = [crossing * x for x in self.boundary] if crossing and any(self.boundary) else None
            return Measure(sums or [0] * len(self.boundary), held)

        return measure


def read_needs(
    memory: Grid, activations: Grid, boundary: Grid, stages: list[Stage], options: list[list[Option]], at: list[int]
) -> Needs:
    """The needs and capacities on one grid, at these positions."""
    capacities = read([0 if stage.capacity is None else stage.capacity for stage in stages], "capacity of stage")
    every = [option for some in options for option in some]
    own = {id(x): x for option in every for x in (option.saved, option.transient) if isinstance(x, Grid)}
    grids = (memory, activations, *own.values(), boundary, capacities)
    (*parts, crossing, rooms), scale = join(*grids)
    unit = math.lcm(*{factor.denominator for option in every for factor in option.factors})
    return Needs(
        [measure_at(at, part).prefix for part in parts],
        list(map([*crossing, 0].__getitem__, at)),
        {name: i for i, name in enumerate(own, 2)},
        unit,
        [None if stage.capacity is None else unit * room for stage, room in zip(stages, rooms, strict=True)],
        scale * unit,
        joint_kind(*(grid.kind for grid in grids)),
    )
