"""Process groups of two ranks, outside of those that torch keeps account of."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

_WITH_OPTIONS = ("nccl", "xccl")


def communicator_of_two(backend: str, name: str, timeout: timedelta, mine: int, other: int) -> Any:
    """What torch would make for a group of that backend; of the two, the lower one is number 0.

    ``torch.distributed.new_group`` names a group by how many there are in the process (PyTorch 2.11 to 2.13), which is
    not the same for two ranks one of which has more neighbours. Where a device is bound to the group of all processes,
    it also splits that, for which all of them have to be there.

    Args:
        backend: such as ``"nccl"``.
        name: of this group, the same for both.
        timeout: how long the two wait for each other to open it.
        mine, other: the ranks.
    """
    c10d: Any = dist.distributed_c10d  # whose names are not exported
    pair = sorted([mine, other])
    store = c10d.PrefixStore(f"gpipe/{name}", c10d._get_default_store())
    # Torch's watchdog ends the process when a transfer takes longer than its group may wait. Ours comes before it.
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
