"""Draw a timeline as SVG: a lane per worker, a cell per action, time to the right.

The picture follows the browser's light or dark mode, and each cell has a tooltip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from profiler.text import format_bytes, format_seconds, format_share

from .._page import escape_xml
from ..schedule import Kind
from ..schedule._actions import MOVES
from ._events import Event
from ._table import heading

if TYPE_CHECKING:
    from ._timeline import Timeline

LEFT, RIGHT, TOP, LANE, PITCH, BELOW = 92, 60, 34, 30, 40, 76
"""Pixels: the margins left of, right of and above the lanes, the height and distance of lanes, and the space below."""

STRIP = 7
"""The height of a transfer from or to the host."""

COLOURS: dict[Kind, str] = {
    Kind.FORWARD: "#7fb0f2",
    Kind.RECOMPUTE: "#f6d776",
    Kind.BACKWARD: "#6fc793",
    Kind.BACKWARD_INPUT: "#b394e6",
    Kind.BACKWARD_WEIGHT: "#f6b3cd",
    Kind.LOSS: "#f0976a",
    Kind.LOAD: "#a7dbe0",
    Kind.UNLOAD: "#c9cdd4",
    Kind.OFFLOAD: "#b9a48c",
    Kind.PREFETCH: "#7fc8c0",
}

_STYLE = """
.gpipe-timeline { font: 11px system-ui, sans-serif; fill: #1f2937 }
.gpipe-timeline .paper { fill: #ffffff }
.gpipe-timeline .idle { fill: #eef0f3 }
.gpipe-timeline .faint { fill: #667085 }
.gpipe-timeline .gist { font-size: 14px; font-weight: 600 }
.gpipe-timeline .number { fill: #111827; text-anchor: middle; pointer-events: none }
@media (prefers-color-scheme: dark) {
.gpipe-timeline { fill: #e5e7eb }
.gpipe-timeline .paper { fill: #14181f }
.gpipe-timeline .idle { fill: #232a35 }
.gpipe-timeline .faint { fill: #9aa4b2 }
}
"""


def svg(panels: Sequence[tuple[str, Timeline]]) -> str:
    """Draw the timelines below each other on the same scale, each under its title."""
    timelines = [timeline for _, timeline in panels]
    cells = max((len(lane) for timeline in timelines for lane in timeline.lanes.values()), default=0)
    # Make room for the names in the cells, within limits.
    span = max((timeline.makespan for timeline in timelines), default=0.0)
    lane = min(1500.0, max(640.0, 24.0 * cells))
    pace = lane / span if span > 0 else 0.0  # pixels per second
    body, y = list[str](), 8
    for title, timeline in panels:
        body += _panel(title, timeline, lane, pace, y)
        y += TOP + max(1, len(timeline.lanes)) * PITCH
    quarters = [span * part / 4 for part in range(5)]
    body += [_text(LEFT + time * pace, y + 10, format_seconds(time), "faint") for time in quarters]
    body += _legend({event.kind for timeline in timelines for event in timeline.events}, y + 28)
    width, height = f"{LEFT + lane + RIGHT:g}", y + BELOW
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="gpipe-timeline" {size} role="img">',
            f'<style>{_STYLE}</style><rect class="paper" width="100%" height="100%" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(title: str, timeline: Timeline, width: float, pace: float, y: float) -> Iterator[str]:
    yield _text(LEFT, y + 18, f"{title}: {heading(timeline)}" if title else heading(timeline), "gist")
    busy = timeline.utilization
    for row, (worker, lane) in enumerate(timeline.lanes.items()):
        top = y + TOP + row * PITCH
        stages = sorted({event.stage for event in lane})
        yield _text(8, top + 13, f"worker {worker}")
        yield _text(8, top + 26, f"stage {', '.join(map(str, stages))}", "faint")
        yield f'<rect class="idle" x="{LEFT}" y="{top}" width="{width:g}" height="{LANE}"/>'
        for event in lane:
            # Stages that share a worker differ in opacity.
            shade = 1 - 0.7 * stages.index(event.stage) / len(stages)
            yield from _cell(event, timeline.start, shade, pace, top)
        yield _text(LEFT + width + 8, top + LANE / 2 + 4, format_share(busy[worker]))


def _cell(event: Event, begin: float, shade: float, pace: float, top: float) -> Iterator[str]:
    x, width = LEFT + (event.start - begin) * pace, event.seconds * pace
    # A gap after each narrow cell would make a busy worker look idle.
    drawn = width - 1 if width >= 5 else width
    # Transfers run beside the computations of their worker, so they are drawn as a strip below these.
    y, height = (top + LANE, STRIP) if event.moves else (top, LANE)
    yield (
        f'<rect class="cell" x="{x:.2f}" y="{y}" width="{drawn:.2f}" height="{height}" fill="{COLOURS[event.kind]}" '
        f'fill-opacity="{shade:.2f}"><title>{escape_xml(describe(event, begin))}</title></rect>'
    )
    if event.moves:
        return
    name = str(event.action)
    # A letter is about 0.65 times as wide as the font size; fonts below 6.5 pixels are illegible.
    size = min(10.0, (width - 2) / (0.65 * len(name)))
    if size >= 6.5:
        yield (
            f'<text class="number" x="{x + width / 2:.2f}" y="{top + LANE / 2 + size / 3:.2f}" '
            f'font-size="{size:.1f}">{name}</text>'
        )


def describe(event: Event, begin: float) -> str:
    """Return the text of a cell's tooltip."""
    held = "unknown" if event.held_bytes is None else format_bytes(event.held_bytes)
    microbatch = "all" if event.kind in (Kind.LOSS, *MOVES) else event.microbatch
    return (
        f"stage: {event.stage} ({event.layers})\nmicro-batch: {microbatch}\nkind: {event.kind.label}\n"
        f"device: {event.device}\nstart: {format_seconds(event.start - begin)}\n"
        f"duration: {format_seconds(event.seconds)}\nwaited: {format_seconds(event.wait)}\n"
        f"moved: {format_bytes(event.bytes_moved)}\nkept after: {held}"
    )


def _legend(kinds: set[Kind], y: float) -> Iterator[str]:
    for k, kind in enumerate(kind for kind in Kind if kind in kinds):
        yield f'<rect x="{LEFT + 120 * k}" y="{y}" width="12" height="12" rx="2" fill="{COLOURS[kind]}"/>'
        yield _text(LEFT + 120 * k + 17, y + 10, kind.label)
    yield _text(LEFT, y + 30, "grey: idle; paler: later stages of a worker", "faint")


def _text(x: float, y: float, what: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:.2f}" y="{y:.2f}">{escape_xml(what)}</text>'
