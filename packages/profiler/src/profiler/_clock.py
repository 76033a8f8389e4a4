"""Clocks for layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import streams


class Timer(NamedTuple):
    """Sets marks behind all work given to a device so far.

    Attributes:
        mark: sets a mark, and returns it.
        seconds: between two marks, by the device.
    """

    mark: Callable[[], Any]
    seconds: Callable[[Any, Any], float]


def timer_for(device: torch.device) -> Timer:
    """The timer for what this thread runs on `device`."""
    if streams.has_streams(device):
        # Events on the current stream: correct although the host runs ahead.
        return Timer(lambda: streams.record_event(streams.current_stream(device), timed=True), _between)
    # Other devices have done their work when a call returns.
    return Timer(time.perf_counter, lambda start, end: end - start)


def _between(start: torch.Event, end: torch.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end) / 1000
