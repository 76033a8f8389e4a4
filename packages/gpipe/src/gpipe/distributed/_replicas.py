"""Synchronize replicas at the end of each step, so that a failure in one is raised in all."""

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
    """The ranks with the same stages in all replicas. They synchronize after the ranks of each replica have.

    By then, each rank has the outcome of its own replica's step, so all ranks of all replicas get the same outcome.

    Args:
        group: these ranks, one per replica; None if there is only one pipe.
        timeout: how long ranks of one replica wait for each other. Replicas wait longer, because a replica needs up to
            three times as long to identify a lost rank, and may have started later.

    Attributes:
        meeting: exchanges reports between these ranks.
    """

    def __init__(self, group: Group | None, timeout: timedelta) -> None:
        self.meeting = Rendezvous(ALONE if group is None else open_groups(group, 4 * timeout + _GRACE))
        self._met = True

    @property
    def are_there(self) -> bool:
        return len(self.meeting.groups.members) > 1

    @contextmanager
    def hearing(self, give_up: Callable[[], None]) -> Iterator[None]:
        """Run a part of a step. If it fails before the replicas have synchronized, the other replicas get the error.

        ``give_up`` is called first, to close the connections that other ranks' layers may be waiting on. If the failure
        is only a consequence of an error in another replica, that error is raised instead.
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
        """Synchronize at the end of a step, if that has not happened yet, and send ``error`` to the other replicas.

        RemoteError if another replica has failed and LostRankError if it has exited, unless ``error`` is this rank's.
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
        for told in sorted(failed, key=is_of_gloo):  # errors that are only consequences of others come last
            raise RemoteError(f"another replica has failed: {told}") from None


def _failure(error: BaseException) -> Report:
    if isinstance(error, LostRankError):
        return {"lost": str(error)}
    if isinstance(error, RemoteError):
        return {"failed": str(error)}
    return {"failed": f"rank {dist.get_rank()} failed: {text_of(error)}"}
