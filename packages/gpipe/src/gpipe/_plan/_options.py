"""Checkpointing options of a stage: which ones fit into memory, and what each costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..schedule import Kind
from ..timeline import StageCost
from ._candidate import SearchSpace, compute_stops
from ._costs import Costs


class StageOption(NamedTuple):
    """One way to train a stage.

    Attributes:
        mode: the checkpoint mode.
        splits: whether the backward is split.
        cost: the cost of the stage on one micro-batch.
        busy: the seconds of work per step.
        share: the stage's peak bytes as a share of its limit.
    """

    mode: str
    splits: bool
    cost: StageCost
    busy: float
    share: float


class Options:
    """The options of all stages, for one number of chunks and one schedule.

    A stage's memory and seconds depend only on its own layers and mode, so each range of layers is evaluated once.
    """

    def __init__(self, space: SearchSpace, costs: Costs, schedule: str) -> None:
        self.space, self.costs, self.schedule = space, costs, schedule
        self._found: dict[tuple[int, int, int], list[StageOption]] = {}

    def fitting(self, j: int, first: int, end: int) -> list[StageOption]:
        """Return the options that fit for stage j with these layers, sorted by work."""
        key = j, first, end
        if key not in self._found:
            fitting = (each for each in self._every(j, first, end) if each.share <= 1)
            self._found[key] = sorted(fitting, key=lambda each: each.busy)
        return self._found[key]

    def least(self, j: int, first: int, end: int) -> StageOption:
        """Return the option that takes the least memory, even if it does not fit."""
        return min(self._every(j, first, end), key=lambda each: each.share)

    def _every(self, j: int, first: int, end: int) -> Iterator[StageOption]:
        """Yield the options, and stop after the mode without recomputation if it fits."""
        for mode in self.space.modes:
            option = self._option(j, first, end, mode)
            yield option
            if mode == "never" and option.share <= 1:
                return

    def _option(self, j: int, first: int, end: int, mode: str) -> StageOption:
        costs, schedule = self.costs, self.schedule
        cost = costs.stage_cost(j, first, end, mode)
        splits = costs.splits(schedule, first, end, cost)
        need = costs.stage_bytes(j, first, end, mode, schedule, splits).total
        again = compute_stops([mode], costs.chunks)[0] * cost.seconds(Kind.RECOMPUTE)
        busy = costs.chunks * (cost.forward + cost.backward) + again
        return StageOption(mode, splits, cost, busy, self.space.share(j, need))
