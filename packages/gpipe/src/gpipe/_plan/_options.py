"""The options of a stage: how it may be checkpointed so that it fits, and what it then costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from heapq import nsmallest
from itertools import product
from typing import NamedTuple

from ..schedule import Kind
from ..schedule._flags import StageMode, mode_of
from ..timeline import StageCost
from ._candidate import Space, stops_of
from ._costs import Costs

ALL_FLAGS = 5
"""Up to so many layers, all combinations of layers to compute again are options of a stage; else some patterns."""

_MOST = 6
"""So many options of a stage that fits are looked at."""


class StageOption(NamedTuple):
    """How a stage may be trained.

    Attributes:
        mode: how it is checkpointed.
        splits: whether its backward is split.
        busy: seconds in a step.
        share: its bytes, as a share of its limit.
    """

    mode: StageMode
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
        self._found: dict[tuple[int, int, int, bool], list[StageOption]] = {}

    def fastest(self, j: int, first: int, end: int, *, few: bool = False) -> list[StageOption]:
        """The fastest of those with which stage j fits with these layers; those with the least work first.

        With ``few``, of a few patterns of recomputed layers only: for many ranges of layers.
        """
        key = j, first, end, few
        if key not in self._found:
            fitting = (each for each in self._every(j, first, end, few=few) if each.share <= 1)
            self._found[key] = nsmallest(_MOST, fitting, key=lambda each: each.busy)
        return self._found[key]

    def least(self, j: int, first: int, end: int) -> StageOption:
        """The one of a few patterns that takes the least memory, whether it fits or not."""
        return min(self._every(j, first, end, few=True), key=lambda each: each.share)

    def _every(self, j: int, first: int, end: int, *, few: bool) -> Iterator[StageOption]:
        """All of them; only the mode without recomputation if that fits."""
        for mode in self._modes(end - first, few):
            option = self._option(j, first, end, mode)
            yield option
            if mode == "never" and option.share <= 1:
                return

    def _modes(self, layers: int, few: bool) -> Iterator[StageMode]:
        yield from self.space.modes
        if len(self.space.modes) > 1:
            yield from map(mode_of, _patterns(layers, few))

    def _option(self, j: int, first: int, end: int, mode: StageMode) -> StageOption:
        costs, schedule = self.costs, self.schedule
        cost = costs.stage_cost(first, end, mode)
        splits = costs.splits(schedule, first, end, cost)
        need = costs.stage_bytes(j, first, end, mode, schedule, splits).total
        again = stops_of([mode], costs.chunks)[0] * cost.seconds(Kind.RECOMPUTE)
        busy = costs.chunks * (cost.forward + cost.backward) + again
        return StageOption(mode, splits, cost, busy, self.space.share(j, need))


@lru_cache(maxsize=1024)
def _patterns(layers: int, few: bool) -> list[tuple[bool, ...]]:
    """Some, but not all, of so many layers: every combination of a few, else runs of equal lengths from the front."""
    if layers <= ALL_FLAGS:
        found = list(product((False, True), repeat=layers))
    else:
        lengths, parts = ((1, 4), 2) if few else ((1, 2, 3, 5, 8, 12, 20), 8)
        runs = [(length, round(layers * share / parts)) for length in lengths for share in range(1, parts + 1)]
        runs += [(covered, covered) for _, covered in runs]  # one run
        found = [tuple(k < covered and k % (length + 1) < length for k in range(layers)) for length, covered in runs]
    return [flags for flags in dict.fromkeys(found) if any(flags) and not all(flags)]
