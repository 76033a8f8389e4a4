"""One choice for all ranks: that of the first stage decides, by what all have measured, and tells the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from ..engine._piecewise import WholeStage
from ..engine._stage import Stage
from ..timeline._chooser import Chooser, Standing, standing_of


class RankChooser(Chooser):
    """Decides as the :class:`Chooser` of a pipe in one process does.

    What it learns comes from all ranks: what actions took, in the recorder of a step, and how stages stand, at the end
    of steps whose schedule is chosen. So a stage that is frozen between two steps is known to be only after the next.

    Args:
        stages: those of this rank.
        me: the number of this rank.
        told: by rank, the stages that are trained, before the first step.
    """

    def __init__(self, stages: Sequence[Stage | WholeStage], me: int, told: Sequence[Sequence[int]]) -> None:
        super().__init__(stages)
        self._me = me
        self._others = [Standing(training=True, trained=tuple(trained), whole=()) for trained in told]
        self._said: Standing | None = None

    def standing(self) -> Standing:
        """That of all stages, as far as it is known here."""
        all_ = [*self._others]
        all_[self._me] = own = standing_of(self._stages)
        trained, whole = (chain.from_iterable(parts) for parts in ([s.trained for s in all_], [s.whole for s in all_]))
        return Standing(own.training, tuple(sorted(trained)), tuple(sorted(whole)))

    def news(self) -> dict[str, Any]:
        """For a report to all ranks: how the stages of this one stand, if that has changed since it was told."""
        before, self._said = self._said, standing_of(self._stages)
        return {} if self._said == before else {"standing": self._said}

    def hear(self, reports: Sequence[dict[str, Any]]) -> None:
        """What ranks have told, in their order."""
        for k, each in enumerate(reports):
            if "standing" in each:
                training, trained, whole = each["standing"]
                self._others[k] = Standing(training, tuple(trained), tuple(whole))
