"""The process groups that the ranks of a pipeline talk over; their own, so that no messages of others mix in."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
    """

    members: tuple[int, ...]
    me: int
    values: dist.ProcessGroup
    control: dist.ProcessGroup
    timeout: timedelta


def open_groups(group: dist.ProcessGroup | None, timeout: timedelta | None) -> Groups:
    """Groups with the members of ``group``, all of which call this.

    Args:
        group: all processes by default.
        timeout: how long to wait for each other; that of ``group`` by default.

    Raises:
        RuntimeError: there is no process group, or this process is not in it.
    """
    group = expect_group(group)
    members = dist.get_process_group_ranks(group)
    timeout = _timeout_of(group) if timeout is None else timeout
    values, control = _gloo(members, timeout), _gloo(members, timeout)
    return Groups(tuple(members), dist.get_rank(group), values, control, timeout)


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


def _gloo(members: Sequence[int], timeout: timedelta) -> Any:
    return dist.new_group(list(members), timeout=timeout, backend="gloo", use_local_synchronization=True)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """What ``group`` was made with. Torch tells nobody, so this looks where it keeps it."""
    for kind in group._device_types:
        options = getattr(group._get_backend(torch.device(kind)), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return _UNKNOWN
