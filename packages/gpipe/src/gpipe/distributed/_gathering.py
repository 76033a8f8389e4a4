"""The processes that save or load a checkpoint together: those of a pipe, replicas of pipes, or one process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ._agreement import Agreement, agreement
from ._errors import LostRankError, RemoteError, text_of
from ._groups import Group, Groups, end_connections, expect_group, forget_group, group_for_collectives, open_groups
from ._rendezvous import Rendezvous

_LOOK = timedelta(seconds=1)


class Gathering(NamedTuple):
    """The processes that take part.

    Attributes:
        meeting: exchanges reports between all members.
        members: the rank of each in the world.
        group: the process group for collectives on the CPU; None for a process alone.
        first: whether this process does the work that one process does for all, such as writing a common file.
        leave: closes the connections of ``group``, so that no member waits in a collective for this one.
    """

    meeting: Rendezvous
    members: tuple[int, ...]
    group: dist.ProcessGroup | None
    first: bool
    leave: Callable[[], None]

    def agreement(self) -> AbstractContextManager[Agreement]:
        """A context for work that each process does by itself: if it raises in one, it raises in all."""
        return agreement(self.meeting, self.members)

    def finish(self, work: Any) -> None:
        """Wait for a collective of ``group``.

        Of several at once, gloo sometimes goes on to wait in one although all its connections are closed. So this looks
        whether another member has left because of it.
        """
        while not work.is_completed():
            try:
                work.wait(_LOOK)
            except RuntimeError:  # it takes longer, or has failed
                left = self.meeting.left()
                if left is not None:
                    self.meeting.leave(left)
                    raise left from None
        work.wait()

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """A context for collectives of ``group``, in which all members fail if one does, and learn why.

        If nobody has ended, the next :func:`gathering_of` opens new connections.

        Raises:
            LostRankError: a process has ended.
            RemoteError: another process raised an error of its own.
        """
        self.meeting.expect_open()
        try:
            yield
        except RuntimeError as error:
            self.leave()
            try:
                self.meeting.expect_connected()
            except LostRankError as lost:
                self.meeting.leave(lost)
                raise
            reports = self.meeting.meet({} if _is_of_connections(error) else {"error": text_of(error)})
            _forget(self)
            if _is_of_connections(error):
                for member, report in zip(self.members, reports, strict=True):
                    if "error" in report:
                        raise RemoteError(f"rank {member} failed: {report['error']}") from None
            raise


def _is_of_connections(error: RuntimeError) -> bool:
    """Whether it may be gloo's, which has no class for those."""
    return type(error) in (RuntimeError, dist.DistBackendError)


_opened: WeakKeyDictionary[dist.ProcessGroup, Gathering] = WeakKeyDictionary()


def gathering_of(group: Group | None) -> Gathering:
    """The members of ``group``, all of which must call this together.

    Args:
        group: all processes by default; without an initialised process group, this process alone.

    Raises:
        RuntimeError: this process is not in ``group``.
    """
    if not (dist.is_available() and dist.is_initialized()):
        alone = Rendezvous(Groups((0,), 0, None, None, timedelta(), None))
        return Gathering(alone, (0,), None, first=True, leave=_nothing)
    group = expect_group(group)
    if group not in _opened:
        groups = open_groups(group, None)
        leave = partial(end_connections, groups.values)
        collectives = group_for_collectives(groups)
        _opened[group] = Gathering(Rendezvous(groups), groups.members, collectives, groups.me == 0, leave)
    return _opened[group]


def _forget(gathering: Gathering) -> None:
    for group in [group for group, opened in _opened.items() if opened is gathering]:
        del _opened[group]
    if gathering.group is not None:
        forget_group(gathering.group)


def _nothing() -> None:
    pass
