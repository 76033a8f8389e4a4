"""Replicas of a pipe that end their steps together, so that a failure in one raises in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from threading import Timer
from typing import Any

import torch.distributed as dist

from ._agreement import Agreement, agreement
from ._errors import LostRankError, RemoteError, is_of_gloo, text_of
from ._groups import Group, open_groups
from ._rendezvous import Rendezvous, Report

_GRACE = timedelta(seconds=30)

_MOMENT = 2.0
"""Seconds until a replica that has failed takes the others to be waiting in a collective of a layer."""


class Replicas:
    """The ranks with the same stages in all replicas. They meet after the ranks of each replica have met.

    So each of them knows how the step of its replica has ended, and all ranks of all replicas learn the same.

    Args:
        group: these ranks, one of each replica; None if there is one pipe only.
        timeout: how long ranks of one replica wait for each other. Replicas wait longer for each other: a replica needs
            up to three times as long to find out which rank it has lost, and may have begun later.
    """

    def __init__(self, group: Group | None, timeout: timedelta) -> None:
        self._groups = None if group is None else open_groups(group, 4 * timeout + _GRACE)
        self._meeting = None if self._groups is None else Rendezvous(self._groups)
        self._met = True
        self._lost: LostRankError | None = None

    @property
    def are_there(self) -> bool:
        """Whether there is more than one replica."""
        return self._groups is not None and len(self._groups.members) > 1

    def agreement(self) -> AbstractContextManager[Agreement]:
        """A context for work that each replica does by itself: if it raises in one, it raises in all."""
        if self._meeting is None or self._groups is None:
            return nullcontext(Agreement())
        return agreement(self._meeting, self._groups.members)

    def begin(self) -> None:
        """Raise :class:`LostRankError` if a rank is lost: then no step begins any more."""
        if self._lost is not None:
            raise LostRankError(str(self._lost))

    @contextmanager
    def hearing(self, follow: Callable[[], None], give_up: Callable[[], None]) -> Iterator[None]:
        """A context for a part of a step: if it fails before the replicas have met, the others are told.

        Args:
            follow: called before they are told; takes part in the collectives for which they wait.
            give_up: called if they do not come to be told; closes the connections of the other collectives.
        """
        self._met = False
        try:
            yield
        except BaseException as error:
            if not self._met and self._lost is None and self._meeting is not None:
                follow()
                self._tell(self._failure(error), give_up)
            raise

    @contextmanager
    def naming(self, give_up: Callable[[], None]) -> Iterator[None]:
        """A context for collectives after the replicas have met: if a rank ends there, the error names it.

        Args:
            give_up: closes the connections of these collectives, in which others may wait for this rank.

        Raises:
            LostRankError: a collective has failed, because a rank has ended.
        """
        try:
            yield
        except RuntimeError as error:
            if self._meeting is None or isinstance(error, RemoteError) or not is_of_gloo(str(error)):
                raise
            give_up()
            try:
                self._meeting.expect_connected()
            except LostRankError as lost:
                self._lost = lost
                raise lost from None
            raise

    def _tell(self, report: Report, give_up: Callable[[], None]) -> None:
        """Tell the others of a failure.

        Raises:
            RemoteError, LostRankError: it has only followed from another one, by which connections were closed.
        """
        late = Timer(_MOMENT, give_up)
        late.start()
        try:
            reports = self._meet(report)
        except LostRankError:  # the next step raises it
            reports = []
        finally:
            late.cancel()
            late.join()
        if is_of_gloo(report.get("failed", "")):
            told = _first(reports)
            if told is not None and not is_of_gloo(told):
                raise RemoteError(f"another replica has failed: {told}") from None
            self.begin()

    def close(self) -> None:
        """Close the connections. No step begins any more."""
        self._groups = self._meeting = None

    def meet(self, choice: Any = None) -> Any:
        """Meet at the end of a step; or before it, where a schedule is chosen.

        Args:
            choice: that of this replica, before a step.

        Returns:
            The choice of the first replica.

        Raises:
            RemoteError: another one has failed.
            LostRankError: a rank has ended, or does not answer.
            ValueError: only some replicas choose a schedule.
        """
        if self._meeting is None:
            return choice
        reports = self._meet({} if choice is None else {"choice": choice})
        if any("lost" in report for report in reports):
            self.begin()
        told = _first(reports)
        if told is not None:
            raise RemoteError(f"another replica has failed: {told}")
        if len({"choice" in report for report in reports}) > 1:
            raise ValueError(
                "the replicas disagree: only some of them were given a schedule that is chosen by measures"
            )
        self._met = choice is None  # else they meet again, at the end of the step
        return reports[0].get("choice")

    def _meet(self, report: Report) -> list[Report]:
        self._met = True
        assert self._meeting is not None
        try:
            reports = self._meeting.meet(report)
        except LostRankError as error:
            self._lost = error
            raise
        for each in reports:
            if "lost" in each:
                self._lost = LostRankError(each["lost"])
        if self._lost is None and any(is_of_gloo(each.get("failed", "")) for each in reports):
            self._lost = LostRankError(
                "connections of layers that compute together with those of other replicas were closed when a replica "
                f"failed; start the processes again, from the last checkpoint. What had failed: {_first(reports)}"
            )
        return reports

    def _failure(self, error: BaseException) -> Report:
        """The report of a failure."""
        if isinstance(error, LostRankError):
            return {"lost": str(error)}
        if isinstance(error, RemoteError):
            return {"failed": str(error)}
        return {"failed": f"rank {dist.get_rank()} failed: {text_of(error)}"}


def _first(reports: Sequence[Report]) -> str | None:
    """The text of a failure; of one that has not only followed from another, if there is any."""
    return next(iter(sorted([each["failed"] for each in reports if "failed" in each], key=is_of_gloo)), None)
