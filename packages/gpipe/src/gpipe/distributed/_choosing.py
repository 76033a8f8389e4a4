"""One choice of the schedule for all ranks: the rank of the first stage chooses, by what all ranks have measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from ..engine._stage import Stage
from ..timeline._chooser import Chooser, Standing, standing_of


class RankChooser(Chooser):
    """Chooses as the :class:`Chooser` of a pipe in one process does.

    It learns from all ranks: how long actions took, from the recorder of a step, and which stages are trained, at the
    end of a step whose schedule is chosen. So a stage that is frozen between two steps counts as frozen one step later.

    Args:
        stages: the stages of this rank.
        me: the number of this rank.
        told: by rank, the stages that are trained, before the first step.
    """

    def __init__(self, stages: Sequence[Stage], me: int, told: Sequence[Sequence[int]]) -> None:
        super().__init__(stages)
        self._me = me
        self._others = [Standing(training=True, trained=tuple(trained), whole=()) for trained in told]
        self._said: Standing | None = None

    def standing(self) -> Standing:
        """Which stages are trained and checkpointed, of all ranks, as far as this rank knows."""
        all_ = [*self._others]
        all_[self._me] = own = standing_of(self._stages)
        trained, whole = (chain.from_iterable(parts) for parts in ([s.trained for s in all_], [s.whole for s in all_]))
        return Standing(own.training, tuple(sorted(trained)), tuple(sorted(whole)))

    def news(self) -> dict[str, Any]:
        """For a report to all ranks: which stages of this rank are trained, if that has changed since the last one."""
        before, self._said = self._said, standing_of(self._stages)
        return {} if self._said == before else {"standing": self._said}

    def hear(self, reports: Sequence[dict[str, Any]]) -> None:
        """Take in what ranks have reported; ``reports`` are in the order of ranks."""
        for k, each in enumerate(reports):
            if "standing" in each:
                self._others[k] = each["standing"]
