"""The memory that layers need and stages have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from ._grid import Grid, join, joint_kind, read
from ._measure import Measure, measure_at
from ._stages import Stage


@dataclass(frozen=True)
class Needs:
    """Sums of memory and of activations at the positions of a problem, and the room on each stage; None is endless."""

    memory: list[int]
    activations: list[int]
    rooms: list[int | None]
    scale: int
    kind: type

    def on(self, stage: int, factor: int) -> tuple[Measure, int]:
        """What a stage that holds so many micro-batches has to hold, and its room."""
        room = self.rooms[stage]
        return (self._measure(0, 0), 0) if room is None else (self._measure(1, factor), room)

    @cached_property
    def _measure(self) -> Callable[[int, int], Measure]:
        @cache  # stages share a few factors, and with them the ranking of the layers
        def measure(once: int, factor: int) -> Measure:
            return Measure([once * m + factor * a for m, a in zip(self.memory, self.activations, strict=True)])

        return measure


def read_needs(memory: Grid, activations: Grid, stages: list[Stage], positions: list[int]) -> Needs:
    """The needs and capacities on one grid."""
    capacities = read([0 if stage.capacity is None else stage.capacity for stage in stages], "capacity of stage")
    (once, each, rooms), scale = join(memory, activations, capacities)
    return Needs(
        measure_at(positions, once).prefix,
        measure_at(positions, each).prefix,
        [None if stage.capacity is None else room for stage, room in zip(stages, rooms, strict=True)],
        scale,
        joint_kind(memory, activations, capacities),
    )
