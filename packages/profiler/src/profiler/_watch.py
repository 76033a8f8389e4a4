"""Clocks: marks on a time line, and the seconds between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ._clock import undisturbed_clock


class Watch(Protocol):
    """Marks what has been asked of a device so far; the seconds between two marks are those the device spent."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class HostWatch:
    """For devices that have finished when the call returns."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.mark = clock

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CUDAWatch:
    """Events on the current stream of `device`: the host may run ahead without shortening anything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


@contextmanager
def watch_for(device: torch.device) -> Iterator[Watch]:
    """The watch for what this thread runs on `device`."""
    if device.type == "cuda":
        yield CUDAWatch(device)
        return
    with undisturbed_clock() as clock:
        yield HostWatch(clock)
