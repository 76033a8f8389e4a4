"""The process groups that the ranks of a pipeline talk over; their own, so that no messages of others mix in."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_torch: Any = dist
"""Whose stubs do not know the names of stores."""

_UNKNOWN = timedelta(minutes=30)


class Groups(NamedTuple):
    """Who takes part, and over what they talk.

    Attributes:
        members: the rank of each in the world.
        me: the number of this process among them.
        values: over which activations and gradients travel.
        control: over which ranks agree. Another group, because gloo closes all connections of one in which a wait took
            too long, and then ranks could no longer report it.
        timeout: how long a rank waits for another one.
        store: shared by the members, and by nobody else.
    """

    members: tuple[int, ...]
    me: int
    values: Any
    control: Any
    timeout: timedelta
    store: Any


def open_groups(group: dist.ProcessGroup | None, timeout: timedelta | None) -> Groups:
    """Connections between the members of ``group``, all of which call this. They end with the last reference to them.

    ``torch.distributed.new_group`` names a group by how many the process has (PyTorch 2.11 to 2.13), which differs
    between processes that are in different groups of the caller's; they would wait for each other in vain. It also
    keeps each group as long as the process lives.

    Args:
        group: all processes by default.
        timeout: how long to wait for each other; that of ``group`` by default.

    Raises:
        RuntimeError: there is no process group, or this process is not in it.
    """
    group = expect_group(group)
    members, me = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
    timeout = _timeout_of(group) if timeout is None else timeout
    store = _own_store(group, me)
    values, control = (
        dist.ProcessGroupGloo(_torch.PrefixStore(name, store), me, len(members), timeout=timeout)
        for name in ("values", "control")
    )
    return Groups(members, me, values, control, timeout, store)


def _own_store(group: dist.ProcessGroup, me: int) -> Any:
    """A part of the store of ``group`` that nobody has used: each member counts there how often it has asked for one.

    Not in the process, which may be in its second world, with processes that are in their first.
    """
    store = group.get_group_store()
    return _torch.PrefixStore(f"gpipe/{store.add(f'gpipe/{me}', 1)}", store)


def group_for_collectives(groups: Groups) -> Any:
    """The connections of ``groups.values`` as a process group that the collectives of torch take.

    As ``new_group`` would make it, but for its name, and torch's list of names: by how long that is it names the groups
    of the caller, which other processes may be in too.
    """
    c10d: Any = dist.distributed_c10d
    kind = c10d.ProcessGroup.BackendType.GLOO
    group = c10d.ProcessGroup(groups.store, groups.me, len(groups.members))
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, groups.values)
    c10d._world.pg_map[group] = "gloo", groups.store
    c10d._world.pg_group_ranks[group] = {member: k for k, member in enumerate(groups.members)}
    return group


def expect_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, by default that of all processes, unless there is none, or this process is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group; call torch.distributed.init_process_group() first, in processes that torchrun "
            "started"
        )
    group = dist.group.WORLD if group is None else group
    if group is None or dist.get_rank(group) < 0:
        raise RuntimeError("group: this process is not in it; call this only in the processes of the group")
    return group


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """What ``group`` was made with. Torch tells nobody, so this looks where it keeps it."""
    for kind in group._device_types:
        options = getattr(group._get_backend(torch.device(kind)), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return _UNKNOWN
