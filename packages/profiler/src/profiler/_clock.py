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
    """Reads the seconds of this thread, without those in which it was ready to run but had no core.

    Time in which the thread waits by itself is counted. On a busy machine a layer longer than a time slice is always
    interrupted, and a short one rarely, so even medians would be biased. Where the system has no such statistics (Linux
    has), it is an ordinary clock.
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
        before = after  # interrupted between the two readings, which then do not belong together


def _queued(statistics: int) -> float:
    """Seconds that the thread has waited in a queue for a core. The file has: running, queued, time slices."""
    _, nanoseconds, _ = os.pread(statistics, 100, 0).split()
    return int(nanoseconds) / 1e9
