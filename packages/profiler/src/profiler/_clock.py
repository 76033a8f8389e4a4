"""Clocks for layers: one for devices with streams, and one that leaves out what other processes do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

import streams

_STATISTICS = "/proc/thread-self/schedstat"


class Timer(NamedTuple):
    """Sets marks behind all work given to a device so far.

    Attributes:
        mark: sets a mark, and returns it.
        seconds: between two marks, by the device.
    """

    mark: Callable[[], Any]
    seconds: Callable[[Any, Any], float]


@contextmanager
def watch_for(device: torch.device) -> Iterator[Timer]:
    """The watch for what this thread runs on `device`."""
    if streams.has_streams(device):
        # Events on the current stream: correct although the host runs ahead.
        yield Timer(lambda: streams.record_event(streams.current_stream(device), timed=True), _between)
        return
    with undisturbed_clock() as clock:
        yield host_watch(clock)


def host_watch(clock: Callable[[], float]) -> Timer:
    """For devices that have done their work when a call returns."""
    return Timer(clock, lambda start, end: end - start)


def _between(start: torch.Event, end: torch.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end) / 1000


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
