"""Marks in time, on the CPU and on streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import streams


def marker(device: torch.device) -> Callable[[], Any]:
    """A function that sets a mark behind all work that this thread has given to `device` so far."""
    if streams.has_streams(device):
        # Events on the current stream: correct although the host runs ahead.
        return lambda: streams.record_event(streams.current_stream(device), timed=True)
    return time.perf_counter  # other devices have done their work when a call returns


def seconds(start: Any, end: Any) -> float:
    if not isinstance(end, torch.Event):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
