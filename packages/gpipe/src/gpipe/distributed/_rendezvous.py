"""A meeting of all ranks: each sends a report, and receives those of all others."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from ._errors import LostRankError, UnreachableError, named
from ._groups import UNSENT, Groups, end_connections
from ._messages import Peer, RemoteLink, Ways

Report = dict[str, Any]
"""A dict that can be pickled. ``report["silent"]`` lists the members that did not answer its sender in time."""

_UP, _DOWN = 0, 1
_GRACE = timedelta(seconds=5)
_MOMENT, _PAUSE = 1.0, 0.05  # seconds


class Rendezvous:
    """Each member sends its report to member 0, which sends the reports of all to each.

    Unlike a collective, this tells which members are missing.

    Args:
        groups: the members, and the connections between them.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        others = range(1, len(groups.members)) if groups.me == 0 else (0,)
        out, into = (_DOWN, _UP) if groups.me == 0 else (_UP, _DOWN)
        ways = {k: Ways(Peer(groups.control, k, out), Peer(groups.control, k, into)) for k in others}
        self._links = {k: RemoteLink(each) for k, each in ways.items()}
        self._count = 0
        self._lost: LostRankError | None = None

    def meet(self, report: Report) -> list[Report]:
        """Send ``report`` and wait for those of the others.

        Returns:
            The reports of all members, in their order.

        Raises:
            LostRankError: a member is missing; so it is in every later meeting.
        """
        self.expect_open()
        self._count += 1
        reports = self._gather(report) if self._groups.me == 0 else self._exchange(report)
        lost = [k for k, each in enumerate(reports) if each is None]
        if lost:
            self._lost = self._told(self._count) or self.lost(lost)
            raise self._lost
        for link in self._links.values():
            link.expect(1)  # for the next meeting
        return reports

    def expect_open(self) -> None:
        """Raise :class:`LostRankError` if there are no more meetings."""
        if self._lost is not None:
            raise LostRankError(str(self._lost))

    def leave(self, why: LostRankError) -> None:
        """Between two meetings: close all connections, so that whoever waits for this member hears ``why``."""
        self._lost = why
        with suppress(RuntimeError):  # if the process with the store has ended, nobody can be told
            self._groups.store.set(_left(self._count + 1), str(why))
        for group in (self._groups.values, self._groups.control):
            end_connections(group)

    def left(self) -> LostRankError | None:
        """Between two meetings: why another member has left; None if none has."""
        return self._told(self._count + 1)

    def _told(self, count: int) -> LostRankError | None:
        with suppress(RuntimeError):
            if self._groups.store.check([_left(count)]):
                return LostRankError(self._groups.store.get(_left(count)).decode())
        return None

    def expect_connected(self) -> None:
        """Check the connections to all members, without a meeting, to which not all may come.

        A process that ends closes its connections one after the other, so look at them for a moment.

        Raises:
            LostRankError: the connections to some members are closed.
        """
        self.expect_open()
        end = time.monotonic() + _MOMENT
        while not (lost := [k for k in range(len(self._groups.members)) if self._is_closed(k)]):
            if time.monotonic() > end:
                return
            time.sleep(_PAUSE)
        self._lost = self.left() or self.lost(lost)  # a member that has left has closed its connections too
        raise self._lost

    def _is_closed(self, member: int) -> bool:
        """Whether the connection to ``member`` is: then gloo refuses to receive. No message with this tag is sent."""
        if member == self._groups.me:
            return False
        try:
            Peer(self._groups.control, member, UNSENT).receive(torch.empty(1, dtype=torch.uint8))
        except UnreachableError:
            return True
        return False

    def lost(self, members: list[int]) -> LostRankError:
        """The error that says that ``members`` (numbers, not ranks) are missing."""
        who = named([self._groups.members[k] for k in members])
        return LostRankError(
            f"{who} ended, or did not answer within {self._groups.timeout.total_seconds():g} s; start the processes "
            "again, from the last checkpoint; if it was only slow, with a timeout longer than a whole step, and what "
            "comes between two, may take"
        )

    def _gather(self, report: Report) -> list[Any]:
        reports: list[Any] = [report, *[None] * len(self._links)]
        silent = {*report.get("silent", ())}
        coming = dict(self._links)
        # Receive from all at once: when a wait for one takes too long, gloo closes the connections to all, but what has
        # been received by then stays.
        for link in coming.values():
            link.expect(1)
        while coming:
            # "Silent" does not mean ended: a rank that did not answer may itself be waiting for one that has ended, and
            # reports when that wait is over. So wait for it too, last and for a short time.
            k = min(coming, key=lambda k: (k in silent, k))
            timeout = min(_GRACE, self._groups.timeout) if k in silent else self._groups.timeout + _GRACE
            with suppress(UnreachableError):
                reports[k] = coming.pop(k).hear(timeout)
                silent.update(reports[k].get("silent", ()))
        if None in reports:
            self._store_lost(reports)
        for k, link in self._links.items():
            if reports[k] is not None:
                with suppress(UnreachableError):
                    link.tell(reports)
                    link.flush()
        return reports

    def _exchange(self, report: Report) -> list[Any]:
        link = self._links[0]
        link.expect(1)
        with suppress(UnreachableError):
            link.tell(report)
            # Wait for the answer before the end of our own sending: member 0 may still be waiting for another member.
            reports = link.hear(2 * (self._groups.timeout + _GRACE))
            link.flush()
            return reports  # type: ignore[no-any-return]
        return self._stored_lost()

    def _store_lost(self, reports: list[Any]) -> None:
        """Write the missing members to the store too: gloo may have closed the connections to the others."""
        with suppress(RuntimeError):
            lost = [k for k, each in enumerate(reports) if each is None]
            self._groups.store.set(self._key, ",".join(map(str, lost)))

    def _stored_lost(self) -> list[Any]:
        """Reports with None for missing members, where member 0 did not answer.

        The missing ones are those that member 0 has written to the store; else member 0 itself.
        """
        lost = [0]
        if self._told(self._count) is not None:  # so it has not come to this meeting
            return [None] * len(self._groups.members)
        with suppress(RuntimeError):
            self._groups.store.wait([self._key], _GRACE)
            lost = [*map(int, self._groups.store.get(self._key).split(b","))]
        return [None if k in lost else {} for k in range(len(self._groups.members))]

    @property
    def _key(self) -> str:
        return f"{self._count}/lost"


def _left(count: int) -> str:
    """Where in the store it is written why a member has left before that meeting."""
    return f"{count}/left"
