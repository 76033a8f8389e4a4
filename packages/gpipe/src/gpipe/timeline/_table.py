"""Format a timeline as a text table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler.text import align, format_bytes, format_seconds, format_share

from ..schedule import Kind
from ._events import Event

if TYPE_CHECKING:
    from ._timeline import Timeline


def heading(timeline: Timeline) -> str:
    """Return a one-line summary."""
    if not timeline.events:
        return "no actions"
    return (
        f"{_format_count(timeline.stages, 'stage')} × {_format_count(timeline.microbatches, 'micro-batch', 'es')} in "
        f"{format_seconds(timeline.makespan)}, bubble {format_share(timeline.bubble)}"
    )


def _format_count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def table(timeline: Timeline) -> str:
    if not timeline.events:
        return heading(timeline)
    rows = [_row(timeline, worker, lane) for worker, lane in timeline.lanes.items()]
    return f"{heading(timeline)}\n{align([list(rows[0]), *(list(row.values()) for row in rows)], left=3)}"


def _row(timeline: Timeline, worker: int, lane: Sequence[Event]) -> dict[str, str]:
    stages = sorted({event.stage for event in lane})
    held = timeline.held(*stages)
    present = {event.kind for event in timeline.events}
    seconds = {kind: sum(event.seconds for event in lane if event.kind == kind) for kind in Kind if kind in present}
    return {
        "worker": str(worker),
        "stages": ", ".join(map(str, stages)),
        "device": ", ".join(sorted({event.device for event in lane})),
        **{kind.removeprefix("backward_"): format_seconds(own) for kind, own in seconds.items()},
        "waiting": format_seconds(sum(event.wait for event in lane)),
        "moved": format_bytes(sum(event.bytes_moved for event in lane)),
        "peak": format_bytes(max(size for _, size in held)) if held else "–",
        "busy": format_share(timeline.utilization[worker]),
    }
