"""Replicas of a pipe that end their steps together, so that a failure in one raises in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from ._errors import LostRankError, RemoteError, is_of_gloo, text_of
from ._groups import ALONE, Group, open_groups
from ._rendezvous import Rendezvous, Report

_GRACE = timedelta(seconds=30)


class Replicas:
    """The ranks with the same stages in all replicas. They meet after the ranks of each replica have met.

    So each knows how the step of its replica has ended, and all ranks of all replicas learn the same.

    Args:
        group: these ranks, one of each replica; None if there is one pipe only.
        timeout: how long ranks of one replica wait for each other. Replicas wait longer: one needs up to three times as
            long to find out which rank it has lost, and may have begun later.

    Attributes:
        meeting: of these ranks.
    """

    def __init__(self, group: Group | None, timeout: timedelta) -> None:
        self.meeting = Rendezvous(ALONE if group is None else open_groups(group, 4 * timeout + _GRACE))
        self._met = True

    @property
    def are_there(self) -> bool:
        return len(self.meeting.groups.members) > 1

    @contextmanager
    def hearing(self, give_up: Callable[[], None]) -> Iterator[None]:
        """A context for a part of a step: if it fails before the replicas have met, the others are told.

        ``give_up`` is called first; it closes the connections on which others may wait for this rank in a layer. A
        failure that has only followed from another one is raised as that one.
        """
        self._met = False
        try:
            yield
        except BaseException as error:
            give_up()
            self.meet(error)
            raise

    def close(self) -> None:
        self.meeting = Rendezvous(ALONE)

    def meet(self, error: BaseException | None = None) -> None:
        """Meet at the end of a step, unless it has met, and tell the others of an ``error``.

        RemoteError or LostRankError if another one has failed, or has ended, unless the ``error`` is this rank's own.
        """
        if self._met:
            return
        self._met = True
        failed: list[str] = []
        with suppress(LostRankError):  # raised below
            reports = self.meeting.meet({} if error is None else _failure(error))
            failed = [
                each["failed"] for k, each in enumerate(reports) if "failed" in each and k != self.meeting.groups.me
            ]
            for each in reports:
                if "lost" in each:
                    self.meeting.leave(each["lost"])
        if error is not None and not is_of_gloo(str(error)):
            return
        self.meeting.expect_open()
        for told in sorted(failed, key=is_of_gloo):  # those that have only followed from another come last
            raise RemoteError(f"another replica has failed: {told}") from None


def _failure(error: BaseException) -> Report:
    if isinstance(error, LostRankError):
        return {"lost": str(error)}
    if isinstance(error, RemoteError):
        return {"failed": str(error)}
    return {"failed": f"rank {dist.get_rank()} failed: {text_of(error)}"}
