"""Processes that save or load together, also those that make no pipe together, such as replicas; or one alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ._agreement import Agreement, Meeting, agreement
from ._errors import UnreachableError
from ._groups import Groups, group_for_collectives, open_groups
from ._messages import Peer
from ._rendezvous import Rendezvous, Report


class Gathering(NamedTuple):
    """Who takes part.

    Attributes:
        meeting: where they meet.
        members: the rank of each in the world.
        group: for collectives on the CPU; None for a process alone.
        first: whether this process does what one has to do for all.
        leave: ends the connections of ``group``, so that nobody waits in a collective for who has left it.
    """

    meeting: Meeting
    members: tuple[int, ...]
    group: dist.ProcessGroup | None
    first: bool
    leave: Callable[[], None]

    def agreement(self) -> AbstractContextManager[Agreement]:
        """Around what each does by itself: if it raises anywhere, it raises everywhere."""
        return agreement(self.meeting, self.members)

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Around collectives of ``group``: when one fails because somebody has ended, all meet to find out who it was.

        Raises:
            LostRankError: somebody has.
        """
        try:
            yield
        except RuntimeError:
            self.leave()
            self.meeting.meet({"failed": True})
            raise


class _Alone:
    def meet(self, report: Report) -> list[Report]:
        return [report]


_opened: WeakKeyDictionary[dist.ProcessGroup, Gathering] = WeakKeyDictionary()


def gathering_of(group: dist.ProcessGroup | None) -> Gathering:
    """The members of ``group``, all of which call this; all processes by default, or this one if there is no group.

    Raises:
        RuntimeError: this process is not in ``group``.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Gathering(_Alone(), (0,), None, first=True, leave=_nothing)
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group not in _opened:
        groups = open_groups(group, None)
        leave = partial(_end_connections, groups)
        collectives = group_for_collectives(groups)
        _opened[group] = Gathering(Rendezvous(groups), groups.members, collectives, groups.me == 0, leave)
    return _opened[group]


def _nothing() -> None:
    pass


def _end_connections(groups: Groups) -> None:
    """Wait in vain for a message that nobody sends: then gloo ends all connections. There is no call that does."""
    peer = Peer(groups.values, (groups.me + 1) % len(groups.members), _UNSENT)
    with suppress(UnreachableError):
        peer.wait(peer.receive(torch.empty(1, dtype=torch.uint8)), timedelta(milliseconds=1))


_UNSENT = 2**20
"""The tag of messages that nobody sends."""
