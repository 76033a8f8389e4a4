"""A timeline in Chrome's trace format, which https://ui.perfetto.dev opens.

A device is a process there, and a worker a thread. Times are microseconds; the arguments of each event hold what the
timeline holds, in seconds.

Source: "Trace Event Format" (the Chromium project).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ._events import Event

if TYPE_CHECKING:
    from ._timeline import Timeline

_MICROSECOND = 1e-6
Entry = dict[str, Any]


def trace(timeline: Timeline, title: str = "") -> str:
    """The text of the file."""
    # Perfetto shows a process as a group of lanes: a device with its workers, and its bytes above them.
    devices = sorted({event.device for event in timeline.events})
    entries = [
        *_names(timeline, devices, title),
        *(entry for worker, lane in timeline.lanes.items() for entry in _slices(lane, worker, devices)),
        *(entry for pid, device in enumerate(devices) for entry in _memory(timeline, device, pid)),
    ]
    return json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _names(timeline: Timeline, devices: list[str], title: str) -> Iterator[Entry]:
    for pid, device in enumerate(devices):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{title} {device}".strip()}}
    for worker, lane in timeline.lanes.items():
        name = f"worker {worker}: stage {', '.join(map(str, sorted({event.stage for event in lane})))}"
        for device in {event.device for event in lane}:
            pid = devices.index(device)
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": worker, "args": {"name": name}}


def _slices(lane: Iterable[Event], worker: int, devices: list[str]) -> Iterator[Entry]:
    for event in lane:
        times = {"ts": event.start / _MICROSECOND, "dur": event.seconds / _MICROSECOND}
        place = {"pid": devices.index(event.device), "tid": worker}
        yield {"ph": "X", "name": str(event), "cat": event.kind, **times, **place, "args": asdict(event)}


def _memory(timeline: Timeline, device: str, pid: int) -> Iterator[Entry]:
    stages = {event.stage for event in timeline.events if event.device == device}
    for moment, size in timeline.held(*stages):
        args = {"bytes": size}
        yield {"ph": "C", "name": "saved activations", "ts": moment / _MICROSECOND, "pid": pid, "tid": 0, "args": args}
