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
    devices = sorted({event.device for event in timeline.events})
    entries = [
        *_names(timeline, devices, title),
        *(entry for worker, lane in timeline.lanes.items() for entry in _slices(lane, worker, devices)),
        *(entry for pid, device in enumerate(devices) for entry in _memory(timeline, device, pid)),
    ]
    return json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _names(timeline: Timeline, devices: list[str], title: str) -> Iterator[Entry]:
    for pid, device in enumerate(devices):
        yield _metadata("process_name", pid, 0, name=f"{title} {device}".strip())
    for worker, lane in timeline.lanes.items():
        stages = ", ".join(str(stage) for stage in sorted({event.stage for event in lane}))
        for device in sorted({event.device for event in lane}):
            pid = devices.index(device)
            yield _metadata("thread_name", pid, worker, name=f"worker {worker}: stage {stages}")
            yield _metadata("thread_sort_index", pid, worker, sort_index=worker)


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Entry:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _slices(lane: Iterable[Event], worker: int, devices: list[str]) -> Iterator[Entry]:
    for event in lane:
        yield {
            "ph": "X",
            "name": str(event),
            "cat": event.kind,
            "ts": event.start / _MICROSECOND,
            "dur": event.seconds / _MICROSECOND,
            "pid": devices.index(event.device),
            "tid": worker,
            "args": asdict(event),
        }


def _memory(timeline: Timeline, device: str, pid: int) -> Iterator[Entry]:
    stages = {event.stage for event in timeline.events if event.device == device}
    for moment, size in timeline.held(*stages):
        args = {"bytes": size}
        yield {"ph": "C", "name": "saved activations", "ts": moment / _MICROSECOND, "pid": pid, "tid": 0, "args": args}
