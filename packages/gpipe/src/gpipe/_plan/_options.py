"""The options of a stage: how it may be checkpointed so that it fits, and what it then costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..schedule import Kind
from ..timeline import StageCost
from ._candidate import Space, stops_of
from ._costs import Costs


class StageOption(NamedTuple):
    """How a stage may be trained.

    Attributes:
        mode: how it is checkpointed.
        splits: whether its backward is split.
        busy: seconds in a step.
        share: its bytes, as a share of its limit.
    """

    mode: str
    splits: bool
    cost: StageCost
    busy: float
    share: float


class Options:
    """The options of all stages, for one number of chunks and one schedule.

    A stage's memory and seconds depend on its own layers and mode alone, so each range of layers is looked at once.
    """

    def __init__(self, space: Space, costs: Costs, schedule: str) -> None:
        self.space, self.costs, self.schedule = space, costs, schedule
        self._found: dict[tuple[int, int, int], list[StageOption]] = {}

    def fitting(self, j: int, first: int, end: int) -> list[StageOption]:
        """Those with which stage j fits with these layers; those with the least work first."""
        key = j, first, end
        if key not in self._found:
            fitting = (each for each in self._every(j, first, end) if each.share <= 1)
            self._found[key] = sorted(fitting, key=lambda each: each.busy)
        return self._found[key]

    def least(self, j: int, first: int, end: int) -> StageOption:
        """The one that takes the least memory, whether it fits or not."""
        return min(self._every(j, first, end), key=lambda each: each.share)

    def _every(self, j: int, first: int, end: int) -> Iterator[StageOption]:
        """All of them; only the mode without recomputation if that fits."""
        for mode in self.space.modes:
            option = self._option(j, first, end, mode)
            yield option
            if mode == "never" and option.share <= 1:
                return

    def _option(self, j: int, first: int, end: int, mode: str) -> StageOption:
        costs, schedule = self.costs, self.schedule
        cost = costs.stage_cost(first, end, mode)
        splits = costs.splits(schedule, first, end, cost)
        need = costs.stage_bytes(j, first, end, mode, schedule, splits).total
        again = stops_of([mode], costs.chunks)[0] * cost.seconds(Kind.RECOMPUTE)
        busy = costs.chunks * (cost.forward + cost.backward) + again
        return StageOption(mode, splits, cost, busy, self.space.share(j, need))
