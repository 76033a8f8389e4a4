"""Collect the failures of a run, and determine which remaining steps to skip."""

from __future__ import annotations

from streams import waiting

from .._current import current
from ..schedule import Step, WorkerSteps, replay
from ..values._describe import Cancelled

When = tuple[float, int]
"""The time of a step if the schedule is replayed with equal durations, and its stage."""


class Failures:
    """The failures of a run. Thread timing does not affect which of them is the earliest.

    After a failure, workers still take the steps that precede it in the schedule, because these may also fail.

    Attributes:
        worker_steps: the steps of all workers, including other processes; it determines the order of failures.
        earliest: the time of the earliest failed step known so far, in any process; None if no step has failed.
    """

    def __init__(self) -> None:
        self._lock = waiting.Lock()
        self.worker_steps: WorkerSteps = ()
        self._ordered: WorkerSteps | None = None
        self._order: dict[Step, When] = {}
        self._errors: list[tuple[When, BaseException]] = []
        self.earliest: When | None = None

    def should_skip(self, step: Step) -> bool:
        with self._lock:
            return self.earliest is not None and self._when(step) > self.earliest

    def forestall_current(self) -> bool:
        step = current.work.step
        assert step is not None
        return self.should_skip(step)

    def add(self, step: Step, error: BaseException) -> None:
        with self._lock:
            # Under the lock, because this may compute the order, which only one worker may do at a time.
            when = self._when(step)
            self._errors.append((when, error))
            self.earliest = when if self.earliest is None else min(self.earliest, when)

    def add_remote(self, when: When) -> None:
        """Record that another process has cancelled the run because of a failure at that time."""
        with self._lock:
            self.earliest = when if self.earliest is None else min(self.earliest, when)

    def stop(self) -> None:
        with self._lock:  # a failure that is being added must not overwrite this
            self.earliest = (float("-inf"), 0)

    def raise_earliest(self) -> None:
        """Raise the failure that is earliest in the schedule; :class:`Cancelled` if only other processes failed."""
        # Another process has failed. All ranks synchronize after the run, and the error is raised there.
        if not self._errors:
            raise Cancelled
        errors, self._errors = self._errors, []
        try:
            raise min(errors, key=lambda pair: pair[0])[1]
        finally:
            del errors  # avoids a reference cycle: the error's traceback refers to this frame

    def _when(self, step: Step) -> When:
        # A run may have steps of forwards and steps of backwards; the order is computed for the current ones.
        if self._ordered is not self.worker_steps:
            self._order = {each: (span.start, each.stage) for each, span in replay(self.worker_steps).items()}
            self._ordered = self.worker_steps
        return self._order[step]
