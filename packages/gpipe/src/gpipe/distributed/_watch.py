"""A thread that ends transfers between accelerators when the other end does not answer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ._errors import UnreachableError
from ._groups import Groups

_PAUSE = 0.05
"""Seconds between two checks."""


class Watch:
    """A thread that checks the transfers of a rank as long as there are any.

    When the process at the other end of a transfer has ended, the device waits for it forever. So does each thread that
    waits for the device, in a call of the driver that Python cannot interrupt. Only aborting the communicator ends
    this. (Torch's own watchdog would end the process.) A process that has ended shows in its closed connection of
    gloo's. Whoever aborts its communicators closes those too, so that ranks whose devices wait for this one abort
    theirs.

    Args:
        groups: the ranks, with connections on which nothing is sent: those of messages must stay as they are when a
            rank ends its transfers. Transfers may make no progress for their timeout.

    Attributes:
        lost: the member whose transfer took too long, or whose process has ended; None if there is none.
    """

    def __init__(self, groups: Groups) -> None:
        self.lost: UnreachableError | None = None
        self._ranks = groups
        self._groups: list[dist.ProcessGroup] = []
        self._members: set[int] = set()
        self._ended: list[int] = []
        self._under_way: deque[tuple[float, Any, int]] = deque()
        self._progress = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def own(self, group: dist.ProcessGroup, member: int) -> None:
        """Abort ``group``, which connects to ``member``, together with the others."""
        self._groups.append(group)
        if member not in self._members:
            self._members.add(member)
            threading.Thread(target=self._attend, args=[member], name="gpipe attends a rank", daemon=True).start()

    def add(self, works: Sequence[Any], member: int) -> None:
        """Check transfers with ``member`` until they have ended."""
        now = time.monotonic()
        with self._lock:
            self._under_way.extend((now, work, member) for work in works)
            if self._thread is None and self._under_way:
                self._thread = threading.Thread(target=self._look, name="gpipe watches transfers", daemon=True)
                self._thread.start()

    def check(self) -> None:
        """Raise :class:`UnreachableError` if communicators were aborted because a member is lost."""
        if self.lost is not None:
            raise self.lost

    def end(self) -> None:
        """Abort all communicators: transfers stop, and the devices go on without them."""
        with self._lock:
            groups, self._groups = self._groups, []
        if groups:
            self._ranks.end()
        for group in groups:
            with suppress(RuntimeError):  # an abort that fails leaves nothing else to try
                group.abort()

    def _attend(self, member: int) -> None:
        """Wait until the connection to ``member`` is closed, at either end."""
        self._ranks.wait_closed(member)
        self._ended.append(member)

    def _look(self) -> None:
        while self._is_any_under_way():
            self.lost = self._found_lost()
            if self.lost is not None:
                self.end()
                return
            time.sleep(_PAUSE)

    def _is_any_under_way(self) -> bool:
        """Forget transfers that have ended; whether any are left."""
        with self._lock:
            while self._under_way and (not self._groups or self._under_way[0][1].is_completed()):
                self._under_way.popleft()
                self._progress = time.monotonic()
            if not self._under_way:
                self._thread = None
            return bool(self._under_way)

    def _found_lost(self) -> UnreachableError | None:
        """The member whose process has ended, or whose transfer took too long; None if there is none so far."""
        for member in self._ended:
            return UnreachableError(member, ConnectionError("the connection has ended"))
        since, _, member = self._under_way[0]
        # The host queues a transfer long before the device starts it: the time counts from the end of the one before.
        if time.monotonic() - max(since, self._progress) > self._ranks.timeout.total_seconds():
            return UnreachableError(member, TimeoutError("timed out"))
        return None
