"""A clock that does not count the time in which another process has the core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

_STATISTICS = "/proc/thread-self/schedstat"


@contextmanager
def undisturbed_clock(path: str = _STATISTICS) -> Iterator[Callable[[], float]]:
    """Reads the seconds of this thread, less those in which it was ready to run and was not let.

    Waiting of its own accord counts as time. On a busy machine a layer longer than a time slice is always interrupted
    and a short one hardly ever, so that not even a median would treat them alike. Where the system keeps no such
    statistics, which Linux does, it is the ordinary clock.
    """
    try:
        statistics = os.open(path, os.O_RDONLY)
    except OSError:
        yield time.perf_counter
        return
    try:
        yield partial(_read, statistics)
    finally:
        os.close(statistics)


def _read(statistics: int) -> float:
    before = _queued(statistics)
    while True:
        now, after = time.perf_counter(), _queued(statistics)
        if after == before:
            return now - before
        before = after  # interrupted between the readings, which then do not belong together


def _queued(statistics: int) -> float:
    """Seconds that the thread has spent in a queue for a core; the file says: running, queued, turns."""
    _, nanoseconds, _ = os.pread(statistics, 100, 0).split()
    return int(nanoseconds) / 1e9
