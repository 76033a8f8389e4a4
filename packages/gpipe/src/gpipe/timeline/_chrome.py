"""Convert a timeline to Chrome's trace format, which https://ui.perfetto.dev opens.

Devices become processes, and workers become threads. Times are in microseconds.

Source: "Trace Event Format" (the Chromium project).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._timeline import Timeline


def trace(timeline: Timeline, title: str = "") -> str:
    # Perfetto shows a process as a group of lanes: a device with its workers.
    pids = {device: pid for pid, device in enumerate(sorted({event.device for event in timeline.events}))}
    entries = [_name("process", f"{title} {device}".strip(), pid) for device, pid in pids.items()]
    for worker, lane in timeline.lanes.items():
        name = f"worker {worker}: stage {', '.join(map(str, sorted({event.stage for event in lane})))}"
        entries += [_name("thread", name, pids[device], worker) for device in {event.device for event in lane}]
        for event in lane:
            place = {"cat": event.kind, "pid": pids[event.device], "tid": worker, "args": asdict(event)}
            times = {"ts": event.start * 1e6, "dur": event.seconds * 1e6}
            entries.append({"ph": "X", "name": str(event), **place, **times})
    return json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _name(what: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}
