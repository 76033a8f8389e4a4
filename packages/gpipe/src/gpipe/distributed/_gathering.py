"""The processes that save, load or average together: those of a pipe, replicas of pipes, or one process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ._groups import ALONE, Group, expect_group, open_groups
from ._rendezvous import Rendezvous

_opened: WeakKeyDictionary[dist.ProcessGroup, Rendezvous] = WeakKeyDictionary()


def gathering_of(group: Group | None) -> Rendezvous:
    """The members of ``group``, all of which must call this together; by default all processes, or this one alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return Rendezvous(ALONE)
    group = expect_group(group)
    if group not in _opened:
        _opened[group] = Rendezvous(open_groups(group, None))
    return _opened[group]


@contextmanager
def collectives(meeting: Rendezvous) -> Iterator[None]:
    """A context for collectives over the connections of ``meeting``; all members meet at its end, and fail together."""
    groups = meeting.groups
    with meeting.reaching():
        groups.peers.update({*range(len(groups.members))} - {groups.me})  # gloo decides which of them exchange messages
        yield
        meeting.meet({})
