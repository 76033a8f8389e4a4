"""Process groups private to a pipeline, so that its messages never mix with the caller's."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ._errors import LostRankError, name_ranks
from ._messages import Peer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_torch: Any = dist
"""The same module without types, because its stubs lack the names of stores."""

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh"
"""The ``group`` arguments of callers: a process group, or a one-dimensional mesh."""

Announce: TypeAlias = Callable[[Sequence[int]], None]

_MOMENT, _PAUSE = 2.0, 0.01  # seconds
_UNKNOWN, _FOR_EVER = timedelta(minutes=30), timedelta(days=365)

_MEETINGS, _UNSENT = 2**18, 2**20
"""The tag of the first exchange, larger than any channel's, and the tag of messages that are never sent."""


class Groups(NamedTuple):
    """The members of a pipeline, and the connections between them.

    Attributes:
        members: the global rank of each member.
        me: the index of this process in ``members``.
        gloo: the group that carries all messages; None for a single process. Gloo closes all its connections when a
            wait times out. The ranks then agree over ``store`` which of them are lost.
        timeout: how long a rank waits for another rank.
        store: the key-value store of the members.
        peers: the members that this one exchanges messages with. Gloo may connect only to them, at the first message
            (``TORCH_GLOO_LAZY_INIT=1``).
        tags: the tags of further exchanges. All members create these in the same order, so tags match and are unique.
    """

    members: tuple[int, ...]
    me: int
    gloo: Any
    timeout: timedelta
    store: Any
    peers: set[int]
    tags: Iterator[int]

    def peer(self, member: int, out: int, into: int, timeout: timedelta | None = None) -> Peer:
        """Return the connection for messages to and from ``member``, with these tags."""
        self.peers.add(member)
        return Peer(self.gloo, member, out, into, timeout=timeout)

    def connect_again(self, name: str) -> Groups:
        """Connect the same members once more, under this name."""
        store = _torch.PrefixStore(name, self.store)
        gloo = dist.ProcessGroupGloo(store, self.me, len(self.members), timeout=self.timeout)
        return self._replace(gloo=gloo, store=store, peers=set())

    def is_closed(self, member: int) -> bool:
        """Return whether the connection to a peer is closed: gloo then fails to start a receive.

        The receive never completes, because no message with its tag is sent.
        """
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
"""The groups of a single process."""


def open_groups(group: Group | None, timeout: timedelta | None, announce: Announce | None = None) -> Groups:
    """Connect the members of ``group``, which call this together.

    ``torch.distributed.new_group`` is unsuitable. It names a group by the number of groups that the process has
    (PyTorch 2.11 to 2.13), which differs between processes if the caller has several groups, and it keeps each group
    until the process exits. These connections close when the last reference to them is dropped.

    Args:
        group: the processes; all by default.
        timeout: how long a member waits for another one; by default the timeout of ``group``.
        announce: called with the members if one of them has not called this within two seconds. It may be in a call
            that needs this member, and ``announce`` raises an error on both.

    Raises:
        LostRankError: a member has not called this within ``timeout``.
        RuntimeError: there is no process group, or this process is not in it.
        ValueError: ``group`` is a mesh with several dimensions.
    """
    group = expect_group(group)
    members, me = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
    timeout = _get_timeout(group) if timeout is None else timeout
    count = _count(group, me, 1)
    store = _torch.PrefixStore(f"{_prefix()}/{count}", group.get_group_store())
    try:
        if not _arrive(store, len(members)) and announce is not None:
            announce(members)
    except BaseException:
        _count(group, me, -1)  # as on the other members, which have not called this
        raise
    try:
        return Groups(members, me, None, timeout, store, set(), itertools.count(_MEETINGS)).connect_again("messages")
    except RuntimeError as error:
        missing = [member for k, member in enumerate(members) if _count(group, k, 0) < count]
        if not missing:
            raise
        raise LostRankError(
            f"{name_ranks(missing)} ended, or did not reach this call within {timeout.total_seconds():g} s; all "
            "processes of the group must create a Rank, save, load and average gradients together"
        ) from error


def _arrive(store: Any, members: int) -> bool:
    """Wait a moment for all ``members``, and return whether all call this; the same on all that do."""
    if store.add("present", 1) == members:
        store.compare_set("arrived", "", "all")
    end = time.monotonic() + _MOMENT
    while not store.check(["arrived"]):
        if time.monotonic() > end:
            store.compare_set("arrived", "", "not all")
        else:
            time.sleep(_PAUSE)
    return bool(store.get("arrived") == b"all")


def _count(group: dist.ProcessGroup, member: int, more: int) -> int:
    """Add ``more`` to the number of times that ``member`` has opened groups with the store of ``group``; return it.

    The store counts, because a process may be in its second world together with processes in their first.
    """
    return int(group.get_group_store().add(f"{_prefix()}/{member}", more))


def _prefix() -> str:
    """Return the prefix of keys in torch's store. It changes at a restart, because torchrun may keep the old counts."""
    return f"gpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def _end_connections(group: Any, peers: Iterable[int]) -> None:
    """Close all connections of ``group``, a gloo group.

    Gloo closes them when a wait times out, so this waits 1 ms for a message that is never sent. It does so for each
    peer, because a receive from a closed connection fails at once.
    """
    for member in peers:
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], member, _UNSENT).wait(timedelta(milliseconds=1))


def end_collectives(group: dist.ProcessGroup) -> None:
    """Close the connections of the caller's ``group`` if it uses gloo, so that pending collectives raise errors."""
    with suppress(RuntimeError):  # the group has no backend for the CPU
        backend = group._get_backend(torch.device("cpu"))
        if backend.name() == "gloo":
            _end_connections(backend, {*range(group.size())} - {group.rank()})


def expect_group(group: Group | None) -> dist.ProcessGroup:
    """Return ``group`` as a process group; by default the group of all processes.

    RuntimeError if there is none or this process is not in it, ValueError for a mesh with several dimensions.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group; call torch.distributed.init_process_group() first, in processes started by "
            "torchrun"
        )
    from torch.distributed.device_mesh import DeviceMesh  # not every build of torch has it

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a mesh of one dimension, such as mesh['pp']; got {group}")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if group is None or dist.get_rank(group) < 0:
        raise RuntimeError("group: this process is not in it; call this only in the processes of the group")
    return group


def _get_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of ``group`` from a private attribute, because torch has no public accessor."""
    for kind in group._device_types:
        options = getattr(group._get_backend(torch.device(kind)), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return _UNKNOWN
