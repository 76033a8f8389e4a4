"""Whether the process of another rank is still there."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._groups import Groups, end_connections

_torch: Any = dist
"""The same module without types: its stubs lack the names of stores."""

_FOR_EVER = timedelta(days=365)


class Presence:
    """A connection to another rank on which nothing is sent: it closes when the process there ends.

    Both ranks wait for a broadcast of the other one, which never comes, in a thread of gloo's. So :attr:`is_over` can
    be read at any time. (Gloo tells nothing of a message until somebody waits for it.)

    Args:
        groups: the ranks.
        member: the other one, which makes one for this rank at the same time.

    Attributes:
        member: the other one.
        end: closes the connection, which the other rank sees. Called when this object is garbage, if not before:
            otherwise gloo would wait for its thread for ever.
    """

    def __init__(self, groups: Groups, member: int) -> None:
        self.member = member
        pair = sorted([groups.me, member])
        other = pair.index(member)
        store = _torch.PrefixStore("present/{}/{}".format(*pair), groups.store)
        group: Any = dist.ProcessGroupGloo(store, 1 - other, 2, timeout=groups.timeout)
        self._broadcast = group.broadcast(torch.empty(1, dtype=torch.uint8), other, _FOR_EVER)
        self.end = weakref.finalize(self, end_connections, group)

    @property
    def is_over(self) -> bool:
        """Whether the connection is closed."""
        return bool(self._broadcast.is_completed())
