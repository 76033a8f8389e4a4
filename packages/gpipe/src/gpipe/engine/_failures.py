"""The failures of a run, and which steps need not be done any more because of them."""

from __future__ import annotations

import threading

from .._current import current
from ..schedule import Step, Walk, replay
from ..values._describe import Cancelled

When = tuple[float, int]
"""When a step is due: its time if the schedule is replayed with equal steps, and its stage."""


class Failures:
    """The failures of a run. Which of them is the earliest does not depend on the timing of threads.

    After a failure, workers still do the steps that come before it in the schedule, since these may fail too.

    Attributes:
        walk: the steps of all workers, also in other processes, which order failures.
        earliest: when the first failed step was due, of all processes as far as is known; None if there is none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.walk: Walk = ()
        self._ordered: Walk | None = None
        self._order: dict[Step, When] = {}
        self._errors: list[tuple[When, BaseException]] = []
        self.earliest: When | None = None

    def forestall(self, step: Step) -> bool:
        with self._lock:
            return self.earliest is not None and self._when(step) > self.earliest

    def forestall_current(self) -> bool:
        step = current.work.step
        assert step is not None
        return self.forestall(step)

    def add(self, step: Step, error: BaseException) -> None:
        with self._lock:
            # Under the lock, since this may compute the order, which two workers would do at once.
            when = self._when(step)
            self._errors.append((when, error))
            self.earliest = when if self.earliest is None else min(self.earliest, when)

    def hear(self, when: When) -> None:
        """Record that another process has cancelled the run, because of a failure that was due then."""
        with self._lock:
            self.earliest = when if self.earliest is None else min(self.earliest, when)

    def stop(self) -> None:
        with self._lock:  # otherwise a failure that is being added could overwrite this
            self.earliest = (float("-inf"), 0)

    def raise_earliest(self) -> None:
        """Raise the failure that comes first in the schedule; :class:`Cancelled` if only others have failed."""
        # Another process has failed. All ranks meet after the run, and the error is raised here then.
        if not self._errors:
            raise Cancelled
        errors, self._errors = self._errors, []
        try:
            raise min(errors, key=lambda pair: pair[0])[1]
        finally:
            del errors  # the error's traceback refers to this frame, which would refer to the error

    def _when(self, step: Step) -> When:
        # A run walks twice, through forwards and backwards, and the order is that of the present walk.
        if self._ordered is not self.walk:
            self._order = {each: (span.start, each.stage) for each, span in replay(self.walk).items()}
            self._ordered = self.walk
        return self._order[step]
