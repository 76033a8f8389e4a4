"""Who ends transfers between accelerators that will never be done."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ._errors import UnreachableError

_PAUSE = 0.05
"""Seconds between looks."""


class Watch:
    """A thread that looks at the transfers of a rank while there are any.

    When the other end of one has gone, the device waits for it forever, and with it each thread that waits for the
    device, in a call of the driver that Python cannot end. Only the end of the communicator does. Torch's own watchdog
    would end the process.

    Args:
        timeout: how long no transfer may make progress.

    Attributes:
        lost: with whom none did; None while all is well.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.lost: UnreachableError | None = None
        self._timeout = timeout.total_seconds()
        self._groups: list[dist.ProcessGroup] = []
        self._under_way: deque[tuple[float, Any, int]] = deque()
        self._progress = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def own(self, group: dist.ProcessGroup) -> None:
        """End this one with the others."""
        self._groups.append(group)

    def add(self, works: Sequence[Any], member: int) -> None:
        """Look at transfers with ``member`` until they are done."""
        now = time.monotonic()
        with self._lock:
            self._under_way.extend((now, work, member) for work in works)
            if self._thread is None and self._under_way:
                self._thread = threading.Thread(target=self._look, name="gpipe watches transfers", daemon=True)
                self._thread.start()

    def check(self) -> None:
        """Raise :class:`UnreachableError` if communicators were ended since nothing came."""
        if self.lost is not None:
            raise self.lost

    def end(self) -> None:
        """End all communicators: what is under way stops, and the devices go on without it."""
        with self._lock:
            groups, self._groups = self._groups, []
        for group in groups:
            with suppress(RuntimeError):  # there is nobody who could do anything about it
                group.abort()

    def _look(self) -> None:
        while (late := self._late()) is None:
            time.sleep(_PAUSE)
        if late >= 0:
            self.lost = UnreachableError(late, TimeoutError("timed out"))
            self.end()

    def _late(self) -> int | None:
        """With whom nothing has happened for too long; -1 if nothing is under way, None if all is well so far."""
        now = time.monotonic()
        with self._lock:
            while self._under_way and (not self._groups or self._under_way[0][1].is_completed()):
                self._under_way.popleft()
                self._progress = now
            if not self._under_way:
                self._thread = None
                return -1
            since, _, member = self._under_way[0]
            # The host asks for transfers long before the device comes to them: the time begins with the one before.
            return member if now - max(since, self._progress) > self._timeout else None
