"""The process groups of a pipeline: its own, so that its messages do not mix with those of the caller's groups."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ._errors import LostRankError, named
from ._messages import Peer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_torch: Any = dist
"""The same module without types: its stubs lack the names of stores."""

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh"
"""What callers give: a process group, or a mesh with one dimension."""

_UNKNOWN, _FOR_EVER = timedelta(minutes=30), timedelta(days=365)

_MEETINGS, _UNSENT = 2**18, 2**20
"""The tags of the first meeting, which is more than those of channels, and of messages that nobody sends."""


class Groups(NamedTuple):
    """The members of a pipeline, and the connections between them.

    Attributes:
        members: the rank of each in the world.
        me: the number of this process among them.
        gloo: the group that carries all messages; None for a process alone. Gloo closes all its connections when a wait
            takes too long: then ranks agree over ``store`` who is lost.
        timeout: how long a rank waits for another one.
        peers: the members with which this one exchanges messages. Gloo may connect only to these, at the first message
            (``TORCH_GLOO_LAZY_INIT=1``).
        tags: of the next meetings. All members make them in the same order, so each has a tag of its own.
    """

    members: tuple[int, ...]
    me: int
    gloo: Any
    timeout: timedelta
    store: Any
    peers: set[int]
    tags: Iterator[int]

    def peer(self, member: int, out: int, into: int, timeout: timedelta | None = None) -> Peer:
        """The other end of messages to and from ``member``."""
        self.peers.add(member)
        return Peer(self.gloo, member, out, into, timeout=timeout)

    def again(self, name: str) -> Groups:
        """The same members, with connections of their own under this name."""
        store = _torch.PrefixStore(name, self.store)
        gloo = dist.ProcessGroupGloo(store, self.me, len(self.members), timeout=self.timeout)
        return self._replace(gloo=gloo, store=store, peers=set())

    def is_closed(self, member: int) -> bool:
        """Whether the connection to a peer is: then gloo refuses to receive. No message with this tag is sent."""
        try:
            self.gloo.recv([torch.empty(1, dtype=torch.uint8)], member, _UNSENT)
        except RuntimeError:
            return True
        return False

    def wait_closed(self, member: int) -> None:
        with suppress(RuntimeError):
            self.gloo.recv([torch.empty(1, dtype=torch.uint8)], member, _UNSENT).wait(_FOR_EVER)

    def end(self) -> None:
        if self.gloo is not None:
            _end_connections(self.gloo, self.peers)


ALONE = Groups((0,), 0, None, timedelta(), None, set(), itertools.count())
"""A process without others."""


def open_groups(group: Group | None, timeout: timedelta | None) -> Groups:
    """Connect the members of ``group``, all of which must call this together.

    ``torch.distributed.new_group`` does not fit: it names a group by the number of groups that the process has (PyTorch
    2.11 to 2.13), which differs between processes in different groups of the caller's; and it keeps each group until
    the process ends. These connections close when the last reference to them goes.

    ``timeout`` is how long a member waits for another one, else LostRankError.
    """
    group = expect_group(group)
    members, me = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
    timeout = _timeout_of(group) if timeout is None else timeout
    count = _count(group, me, 1)
    store = _torch.PrefixStore(f"{_prefix()}/{count}", group.get_group_store())
    try:
        return Groups(members, me, None, timeout, store, set(), itertools.count(_MEETINGS)).again("messages")
    except RuntimeError as error:
        missing = [member for k, member in enumerate(members) if _count(group, k, 0) < count]
        if not missing:
            raise
        raise LostRankError(
            f"{named(missing)} ended, or did not come here within {timeout.total_seconds():g} s; all processes of the "
            "group make a Rank, save, load and average gradients together"
        ) from error


def _count(group: dist.ProcessGroup, member: int, more: int) -> int:
    """How often ``member`` has opened groups among those of ``group``, and ``more``.

    The store counts that: a process may be in its second world, together with others in their first.
    """
    return int(group.get_group_store().add(f"{_prefix()}/{member}", more))


def _prefix() -> str:
    """Where keys in a store of torch's begin: torchrun may keep the store, and its counts, at a restart."""
    return f"gpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def _end_connections(group: Any, peers: Iterable[int]) -> None:
    """Close all connections of ``group``, a gloo group.

    Gloo closes them when a wait takes too long: wait 1 ms for a message that nobody sends, from each peer, as a
    connection that is closed already does not wait.
    """
    for member in peers:
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], member, _UNSENT).wait(timedelta(milliseconds=1))


def end_collectives(group: dist.ProcessGroup) -> None:
    """Close the connections of a gloo group of the caller's: collectives in which others wait end with an error."""
    with suppress(RuntimeError):  # the group has no backend for the CPU
        backend = group._get_backend(torch.device("cpu"))
        if backend.name() == "gloo":
            _end_connections(backend, {*range(group.size())} - {group.rank()})


def expect_group(group: Group | None) -> dist.ProcessGroup:
    """``group`` as a process group, by default that of all processes; an error if this process is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group; call torch.distributed.init_process_group() first, in processes that torchrun "
            "started"
        )
    from torch.distributed.device_mesh import DeviceMesh  # not every build of torch has it

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a mesh of one dimension, such as mesh['pp'], got {group}")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if group is None or dist.get_rank(group) < 0:
        raise RuntimeError("group: this process is not in it; call this only in the processes of the group")
    return group


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout of ``group``, from a private attribute: torch has no public way to ask for it."""
    for kind in group._device_types:
        options = getattr(group._get_backend(torch.device(kind)), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return _UNKNOWN
