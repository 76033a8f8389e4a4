"""The failures of a run that several ranks take part in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..engine._failures import Failures, When
from ..schedule import Step, Walk
from ..values._describe import Cancelled

BEFORE: Final[When] = (-1.0, -1)
"""The time of a failure before the first step of a run."""


class RankFailures(Failures):
    """The failures of this rank, and when the earliest failure of other ranks was due, as far as this one has been
    told.

    Attributes:
        whole: returns the steps of all ranks, which order failures; called only if there are failures.
    """

    def __init__(self) -> None:
        super().__init__()
        self.whole: Callable[[], Walk] = tuple
        self._whole: Walk = ()

    def hear(self, when: When) -> None:
        """Note that another rank has cancelled the run, because of a failure that was due then."""
        with self._lock:
            self.earliest = min(self.earliest or when, when)

    def _when(self, step: Step) -> When:
        if not self._whole:
            self.walk = self._whole = self.whole()
        return super()._when(step)

    def raise_earliest(self) -> None:
        """Raise the earliest failure of this rank; :class:`Cancelled` if only other ranks have failed."""
        super().raise_earliest()
        raise Cancelled
