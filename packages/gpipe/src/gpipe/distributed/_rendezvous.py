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
"""A dict that can be pickled. ``"silent"`` and ``"closed"`` list the members that its sender could not reach."""

_UP, _DOWN = 0, 1
_GRACE = timedelta(seconds=5)
_MOMENT, _PAUSE = 2.0, 0.05  # seconds


class Rendezvous:
    """Each member sends its report to member 0, which sends the reports of all to each.

    If that fails, each member that is still there says so over the store: whoever does not is lost.

    Args:
        groups: the members, and the connections between them.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        others = range(1, len(groups.members)) if groups.me == 0 else (0,)
        out, into = (_DOWN, _UP) if groups.me == 0 else (_UP, _DOWN)
        ways = [Ways(Peer(groups.control, k, out), Peer(groups.control, k, into)) for k in others]
        self._links = [RemoteLink(each) for each in ways]
        self._lost: LostRankError | None = None

    def meet(self, report: Report) -> list[Report]:
        """Send ``report`` and wait for those of the others.

        Returns:
            The reports of all members, in their order.

        Raises:
            LostRankError: a member is missing; so it is in every later meeting.
        """
        self.expect_open()
        try:
            return self._gather(report) if self._groups.me == 0 else self._exchange(report)
        except UnreachableError as error:
            self._lost = self._found_lost({error.member, *report.get("silent", ()), *report.get("closed", ())})
            raise self._lost from None

    def expect_open(self) -> None:
        """Raise :class:`LostRankError` if there are no more meetings."""
        if self._lost is not None:
            raise LostRankError(str(self._lost))

    def leave(self, why: LostRankError) -> None:
        """Between two meetings: close all connections, so that whoever waits for this member hears ``why``."""
        self._lost = why
        with suppress(RuntimeError):  # if the process with the store has ended, nobody can be told
            self._groups.store.compare_set("lost", "", str(why))
        for group in (self._groups.values, self._groups.control):
            end_connections(group)

    def left(self) -> LostRankError | None:
        """Why there are no more meetings, as another member says; None if none says so."""
        with suppress(RuntimeError):
            if self._groups.store.check(["lost"]):
                return LostRankError(self._groups.store.get("lost").decode())
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

    def _gather(self, report: Report) -> list[Report]:
        for link in self._links:
            link.expect(1)  # from all at once
        reports = [report, *[link.hear(self._groups.timeout + _GRACE) for link in self._links]]
        for link in self._links:
            with suppress(UnreachableError):  # a member that has ended since it reported is missing in the next meeting
                link.tell(reports)
                link.flush()
        return reports

    def _exchange(self, report: Report) -> list[Report]:
        (link,) = self._links
        link.expect(1)
        link.tell(report)
        # Wait for the answer before the end of our own sending: member 0 may still be waiting for another member.
        reports: list[Report] = link.hear(2 * (self._groups.timeout + _GRACE))
        link.flush()
        return reports

    def _found_lost(self, suspects: set[int]) -> LostRankError:
        """The error that all members raise.

        Args:
            suspects: those that this member could not reach. They may be there all the same, and come a moment later:
                gloo closes the connections of a member that has waited too long for another one.
        """
        end_connections(self._groups.control)  # so that whoever waits for this member comes here too
        with suppress(RuntimeError):
            return self.left() or self._called_roll(suspects)
        return self.lost(sorted(suspects))  # the process with the store has ended

    def _called_roll(self, suspects: set[int]) -> LostRankError:
        """Say over the store that this member is there, and wait for the others; the first to know says who is lost."""
        store, missing = self._groups.store, {*range(len(self._groups.members))}
        store.set(f"here/{self._groups.me}", ",".join(map(str, suspects)))
        end = time.monotonic() + (self._groups.timeout + _GRACE).total_seconds()
        while (told := self.left()) is None:
            for k in [k for k in missing if store.check([f"here/{k}"])]:
                missing.remove(k)
                suspects |= {*map(int, store.get(f"here/{k}").split(b","))}
            if missing <= suspects:
                end = min(end, time.monotonic() + _MOMENT)
            if not missing or time.monotonic() > end:
                store.compare_set("lost", "", str(self.lost(sorted(missing or suspects))))
            else:
                time.sleep(_PAUSE)
        return told
