"""Synchronize replicas at the end of each step: a failure in one is raised in all, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from ._agreement import METHOD, expect_same
from ._average import average, find_averaged_parameters
from ._errors import LostRankError, RemoteError, format_error, is_of_gloo
from ._groups import ALONE, Announce, Group, expect_group, open_groups
from ._object_exchange import ObjectExchange, Report

_GRACE = timedelta(seconds=30)


class Replicas:
    """The ranks with the same stages in all replicas. They synchronize after the ranks of each replica have.

    By then, each rank has the outcome of its own replica's step, so all ranks of all replicas get the same outcome.

    Args:
        group: these ranks, one per replica; None if there is only one pipe.
        timeout: how long ranks of one replica wait for each other. Replicas wait longer, because a replica needs up to
            three times as long to identify a lost rank, and may have started later.
        announce: see :func:`open_groups`.

    Attributes:
        meeting: exchanges reports between these ranks.
        group: their process group, if any.
    """

    def __init__(self, group: Group | None, timeout: timedelta, announce: Announce | None = None) -> None:
        self.meeting = ObjectExchange(ALONE if group is None else open_groups(group, 4 * timeout + _GRACE, announce))
        self.group = None if group is None else expect_group(group)
        self._met = True
        self._may_average = False  # whether the other replicas expect this one to average gradients

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
            self._tell_late(error)
            raise

    def average(self, module: nn.Module) -> None:
        """Average the gradients of ``module`` at the end of a step, in which all replicas have succeeded."""
        self._may_average = False
        if self.group is not None and self.are_there:
            average(find_averaged_parameters(module, self.group), self.meeting, self.group)

    def skip_average(self) -> None:
        self._may_average = False

    def announce(self, method: str) -> None:
        """Synchronize at the begin of a call that all replicas make together. ValueError if one makes another call."""
        if self.are_there:
            expect_same(self.meeting.all_gather({METHOD: method}), self.meeting.groups.members, METHOD)

    def _tell_late(self, error: BaseException) -> None:
        """Send an error that was raised after replicas have synchronized to those that wait to average gradients."""
        if self._may_average and self.are_there:
            self._may_average = False
            with suppress(LostRankError):
                self.meeting.all_gather({METHOD: "average_gradients", **_failure(error)})

    def close(self) -> None:
        self.meeting = ObjectExchange(ALONE)

    def meet(self, error: BaseException | None = None) -> None:
        """Synchronize at the end of a step, if that has not happened yet, and send ``error`` to the other replicas.

        RemoteError if another replica has failed and LostRankError if it has exited, unless ``error`` is this rank's.
        """
        if self._met:
            return
        self._met = True
        failed: list[str] = []
        with suppress(LostRankError):  # raised below
            reports = self.meeting.all_gather({METHOD: "step", **({} if error is None else _failure(error))})
            failed = [
                each["failed"] for k, each in enumerate(reports) if "failed" in each and k != self.meeting.groups.me
            ]
            for each in reports:
                if "lost" in each:
                    self.meeting.leave(each["lost"])
        if error is not None and not is_of_gloo(str(error)):
            return
        self.meeting.expect_open()
        for text in sorted(failed, key=is_of_gloo):  # errors that are only consequences of others come last
            raise RemoteError(f"another replica has failed: {text}") from None
        expect_same(reports, self.meeting.groups.members, METHOD)
        self._may_average = True


def _failure(error: BaseException) -> Report:
    if isinstance(error, LostRankError):
        return {"lost": str(error)}
    if isinstance(error, RemoteError):
        return {"failed": str(error)}
    return {"failed": f"rank {dist.get_rank()} failed: {format_error(error)}"}
