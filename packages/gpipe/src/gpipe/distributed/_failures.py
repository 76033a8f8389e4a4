"""Failures of a run that several ranks do together."""

from __future__ import annotations

import json
from typing import Final

from ..engine._failures import Failures, When
from ..values._describe import Cancelled

BEFORE: Final[When] = (-1.0, -1)
"""When something fails before the first step."""


class RankFailures(Failures):
    """Those of this rank's share of a walk, and when the earliest of others was due, as far as it has heard."""

    def hear(self, poison: bytes) -> None:
        """Another rank has given up, because of something that was due then."""
        when, stage = json.loads(poison)
        with self._lock:
            self.earliest = min(self.earliest or (when, stage), (when, stage))

    def poison(self) -> bytes:
        """What other ranks are to hear."""
        return json.dumps(self.earliest or BEFORE).encode()

    def raise_earliest(self) -> None:
        """As of any failures; :class:`Cancelled` if only others have failed."""
        super().raise_earliest()
        raise Cancelled
