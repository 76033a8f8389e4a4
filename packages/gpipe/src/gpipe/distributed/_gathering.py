"""Processes that save or load together, also those that make no pipe together, such as replicas; or one alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ._agreement import Agreement, Meeting, agreement
from ._groups import open_groups
from ._rendezvous import Rendezvous, Report


class Gathering(NamedTuple):
    """Who takes part.

    Attributes:
        meeting: where they meet.
        members: the rank of each in the world.
        group: for collectives on the CPU; None for a process alone.
        first: whether this process does what one has to do for all.
    """

    meeting: Meeting
    members: tuple[int, ...]
    group: dist.ProcessGroup | None
    first: bool

    def agreement(self) -> AbstractContextManager[Agreement]:
        """Around what each does by itself: if it raises anywhere, it raises everywhere."""
        return agreement(self.meeting, self.members)


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
        return Gathering(_Alone(), (0,), None, first=True)
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group not in _opened:
        groups = open_groups(group, None)
        _opened[group] = Gathering(Rendezvous(groups), groups.members, groups.values, first=groups.me == 0)
    return _opened[group]
