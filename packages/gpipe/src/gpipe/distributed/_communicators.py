"""Process groups of two ranks that are not entered in torch's tables."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_WITH_OPTIONS = ("nccl", "xccl")


def communicator_of_two(backend: str, name: str, timeout: timedelta, mine: int, other: int) -> Any:
    """The process group that torch would make for two ranks and that backend. The lower rank is member 0.

    ``torch.distributed.new_group`` does not fit: it names a group by the number of groups in the process (PyTorch 2.11
    to 2.13), which differs between two ranks one of which has more neighbours. And where a device is bound to the group
    of all processes, it splits that group, a collective of all processes.

    Args:
        backend: the name of the backend, such as ``"nccl"``.
        name: the name of this group, the same on both ranks.
        timeout: how long the two wait for each other to open it.
        mine, other: the rank of this process, and the other one.
    """
    c10d: Any = dist.distributed_c10d  # its stubs do not export these names
    pair = sorted([mine, other])
    store = c10d.PrefixStore(f"gpipe/{name}", c10d._get_default_store())
    # Torch's watchdog ends the process when a transfer takes longer than the timeout of its group. Ours raises before.
    longer = 2 * timeout + timedelta(minutes=1)
    if backend in _WITH_OPTIONS:
        kind = getattr(c10d, f"ProcessGroup{backend.upper()}")
        options = kind.Options()
        options._timeout, options.global_ranks_in_group, options.group_name = longer, pair, name
        return kind(store, pair.index(mine), 2, options)
    plugin = dist.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, pair.index(mine), 2, longer)
    given = c10d._DistributedBackendOptions()
    given.store, given.group_rank, given.group_size, given.timeout = store, pair.index(mine), 2, longer
    given.group_id, given.global_ranks_in_group = name, pair
    return plugin.creator_fn(given, None)
