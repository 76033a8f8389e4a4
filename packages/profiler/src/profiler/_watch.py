"""Clocks: marks, and the seconds between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

import streams

from ._clock import undisturbed_clock


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
