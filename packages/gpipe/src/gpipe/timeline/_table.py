"""A timeline as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from profiler.text import align, format_bytes, format_seconds, format_share

from ..schedule import Kind
from ._events import SECONDS, Event

if TYPE_CHECKING:
    from ._timeline import Timeline

# Narrower than the labels of both parts of a backward.
_HEADS = {Kind.BACKWARD_INPUT: "inputs", Kind.BACKWARD_WEIGHT: "weights"}


def duration(time: float, unit: str) -> str:
    """``time`` as people read it."""
    return format_seconds(time) if unit == SECONDS else f"{time:g} {unit}"


def heading(timeline: Timeline) -> str:
    """The gist, in a line."""
    if not timeline.events:
        return "no actions"
    return (
        f"{_counted(timeline.stages, 'stage')} × {_counted(timeline.microbatches, 'micro-batch', 'es')} in "
        f"{duration(timeline.makespan, timeline.unit)}, bubble {format_share(timeline.bubble)}"
    )


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def table(timeline: Timeline) -> str:
    """A line for each worker: its seconds by kind of action, its waiting time, and the bytes that it moved and held."""
    if not timeline.events:
        return heading(timeline)
    kinds = kinds_in(timeline)
    head = [
        "worker",
        "stages",
        "device",
        *(_HEADS.get(kind, kind.label) for kind in kinds),
        "waiting",
        "moved",
        "peak",
        "busy",
    ]
    busy = timeline.utilisation
    rows = [_row(timeline, worker, lane, kinds, busy[worker]) for worker, lane in timeline.lanes.items()]
    return f"{heading(timeline)}\n{align([head, *rows], left=3)}"


def kinds_in(timeline: Timeline) -> list[Kind]:
    """The kinds of action that occur."""
    present = {event.kind for event in timeline.events}
    return [kind for kind in Kind if kind in present]


def _row(timeline: Timeline, worker: int, lane: Sequence[Event], kinds: Sequence[Kind], busy: float) -> list[str]:
    stages = sorted({event.stage for event in lane})
    held = timeline.held(*stages)
    return [
        str(worker),
        ", ".join(map(str, stages)),
        ", ".join(sorted({event.device for event in lane})),
        *(duration(sum(e.seconds for e in lane if e.kind == kind), timeline.unit) for kind in kinds),
        duration(sum(event.wait for event in lane), timeline.unit),
        format_bytes(sum(event.bytes_moved for event in lane)),
        format_bytes(max(size for _, size in held)) if held else "–",
        format_share(busy),
    ]
