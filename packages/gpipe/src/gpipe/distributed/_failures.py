"""Failures of a run that several ranks do together."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from ..engine._failures import Failures, When
from ..schedule import Step, Walk
from ..values._describe import Cancelled

BEFORE: Final[When] = (-1.0, -1)
"""When something fails before the first step."""


class RankFailures(Failures):
    """Those of this rank's share of a walk, and when the earliest of others was due, as far as it has heard.

    Attributes:
        whole: makes the walk of all ranks, by which failures are ordered; asked for only if there are any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.whole: Callable[[], Walk] = tuple
        self._whole: Walk = ()

    def hear(self, poison: bytes) -> None:
        """Another rank has given up, because of something that was due then."""
        when, stage = json.loads(poison)
        with self._lock:
            self.earliest = min(self.earliest or (when, stage), (when, stage))

    def _when(self, step: Step) -> When:
        if not self._whole:
            self.walk = self._whole = self.whole()
        return super()._when(step)

    def poison(self) -> bytes:
        """What other ranks are to hear."""
        return json.dumps(self.earliest or BEFORE).encode()

    def raise_earliest(self) -> None:
        """As of any failures; :class:`Cancelled` if only others have failed."""
        super().raise_earliest()
        raise Cancelled
