"""What went wrong in a run, and what need not be done any more because of it."""

from __future__ import annotations

import threading

from .._current import current
from ..schedule import Step, Walk, replay

When = tuple[float, int]
"""The time of a step in a replay of the walk, and its stage: the order of the schedule."""


class Failures:
    """The failures of a walk. Which of them is the earliest does not depend on the timing of threads.

    After a failure workers still do what comes before it in the schedule, since that might fail too; and nothing that
    comes after. Without a failure nobody computes the order.

    Attributes:
        walk: the one that is under way.
        earliest: when the first of them was due; None if there is none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.walk: Walk = ()
        self._ordered: Walk = ()
        self._order: dict[Step, When] = {}
        self._errors: list[tuple[When, BaseException]] = []
        self.earliest: When | None = None

    def forestall(self, step: Step) -> bool:
        """Whether something has failed that comes before ``step``."""
        with self._lock:
            return self.earliest is not None and self._when(step) > self.earliest

    def forestall_current(self) -> bool:
        """Whether something has failed that comes before what this thread is doing."""
        assert current.step is not None
        return self.forestall(current.step)

    def add(self, step: Step, error: BaseException) -> None:
        """``step`` has failed."""
        with self._lock:
            when = self._when(step)
            self._errors.append((when, error))
            self.earliest = when if self.earliest is None else min(self.earliest, when)

    def stop(self) -> None:
        """Let nothing be done any more."""
        with self._lock:  # else a failure that is just being added might take its place
            self.earliest = (float("-inf"), 0)

    def raise_earliest(self) -> None:
        """Raise the failure that comes first in the schedule, if there is any."""
        if not self._errors:
            return
        errors, self._errors = self._errors, []
        try:
            raise min(errors, key=lambda pair: pair[0])[1]
        finally:
            del errors  # the error's traceback holds this frame, which would hold the error

    def _when(self, step: Step) -> When:
        if self._ordered is not self.walk:
            self._order = {each: (span.start, each.stage) for each, span in replay(self.walk).items()}
            self._ordered = self.walk
        return self._order[step]
