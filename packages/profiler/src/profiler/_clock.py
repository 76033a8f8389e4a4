"""Clocks for layers: one for devices with streams, and one that leaves out what other processes do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

import streams

_STATISTICS = "/proc/thread-self/schedstat"


class Watch(Protocol):
    """Sets marks behind all work given to a device so far. The seconds between two marks are the device's."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class HostWatch:
    """For devices that have done their work when a call returns."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.mark = clock

    def seconds(self, start: float, end: float) -> float:
        return end - start


class StreamWatch:
    """Events on the current stream of an accelerator: correct although the host runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> streams.AbstractEvent:
        return streams.record_event(streams.current_stream(self._device), timed=True)

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


@contextmanager
def watch_for(device: torch.device) -> Iterator[Watch]:
    """The watch for what this thread runs on `device`."""
    if streams.has_streams(device):
        yield StreamWatch(device)
        return
    with undisturbed_clock() as clock:
        yield HostWatch(clock)


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
