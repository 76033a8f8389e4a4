"""A timeline as a picture: a lane for each worker, a cell for each action, time to the right.

Below a lane a strip shows the activations that its stages keep. The picture follows the reader's choice of light or
dark, and each cell says in its title what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profiler.text import format_bytes, format_share, time_unit

from .._page import escaped
from ..schedule import Kind
from ._events import SECONDS, Event, Events
from ._table import duration, heading, kinds_in

LEFT, RIGHT, TOP, GAP = 92.0, 76.0, 34.0, 10.0
LANE, STRIP = 30.0, 14.0
LEGEND, NOTES, AXIS = 28.0, 20.0, 36.0
NARROW = 5.0
"""Pixels: narrower cells have no line around them."""

COLOURS: dict[Kind, str] = {
    Kind.FORWARD: "#7fb0f2",
    Kind.RECOMPUTE: "#f6d776",
    Kind.BACKWARD: "#6fc793",
    Kind.BACKWARD_INPUT: "#b394e6",
    Kind.BACKWARD_WEIGHT: "#f6b3cd",
}

_STYLE = """
.gpipe-timeline { font-family: ui-sans-serif, system-ui, sans-serif; font-size: 11px; fill: #1f2937 }
.gpipe-timeline .paper { fill: #ffffff }
.gpipe-timeline .idle { fill: #eef0f3 }
.gpipe-timeline .grid { stroke: #ffffff }
.gpipe-timeline .faint { fill: #667085 }
.gpipe-timeline .gist { font-size: 14px; font-weight: 600 }
.gpipe-timeline .held { fill: #98a2b3 }
.gpipe-timeline .cell { stroke: #ffffff; stroke-width: 1; vector-effect: non-scaling-stroke }
.gpipe-timeline .number { fill: #111827; text-anchor: middle; pointer-events: none }
.gpipe-timeline .end { text-anchor: end }
.gpipe-timeline .middle { text-anchor: middle }
@media (prefers-color-scheme: dark) {
.gpipe-timeline { fill: #e5e7eb }
.gpipe-timeline .paper { fill: #14181f }
.gpipe-timeline .idle { fill: #232a35 }
.gpipe-timeline .grid, .gpipe-timeline .cell { stroke: #14181f }
.gpipe-timeline .faint { fill: #9aa4b2 }
.gpipe-timeline .held { fill: #667085 }
}
"""


@dataclass(frozen=True)
class Scale:
    """From seconds to pixels.

    Attributes:
        span: the seconds that all of ``width`` is.
        peak: the bytes that are as high as a strip.
        digits: of the largest micro-batch.
        unit: of time.
    """

    span: float
    width: float
    peak: int
    digits: int
    unit: str = SECONDS

    def x(self, seconds: float) -> float:
        return seconds / self.span * self.width if self.span > 0 else 0.0


def svg(panels: Sequence[tuple[str, Events]]) -> str:
    """The timelines, each under its title, one below the other in the same scale."""
    span = max((timeline.makespan for _, timeline in panels), default=0.0)
    last = max((timeline.microbatches - 1 for _, timeline in panels), default=0)
    peak = max((_most(timeline) for _, timeline in panels), default=0)
    scale = Scale(span, _width(panels), peak, len(str(max(0, last))), _unit(panels))
    y = 8.0
    body: list[str] = []
    for title, timeline in panels:
        body += _panel(title, timeline, scale, y)
        y += TOP + max(1, len(timeline.lanes)) * _pitch(scale) + GAP
    body += [*_axis(scale, y - GAP), *_legend(panels, scale, y + AXIS - GAP)]
    return "\n".join(
        [*_opening(LEFT + scale.width + RIGHT, y + AXIS + LEGEND + NOTES - GAP, scale, panels), *body, "</svg>", ""]
    )


def _unit(panels: Sequence[tuple[str, Events]]) -> str:
    units = {timeline.unit for _, timeline in panels} or {SECONDS}
    if len(units) > 1:
        raise ValueError(f"beside: timelines in {' and in '.join(sorted(units))} have no common scale")
    return units.pop()


def _width(panels: Sequence[tuple[str, Events]]) -> float:
    """Wide enough for the numbers in the cells, within reason."""
    cells = max((len(lane) for _, timeline in panels for lane in timeline.lanes.values()), default=0)
    return min(1500.0, max(640.0, 24.0 * cells))


def _pitch(scale: Scale) -> float:
    """From one lane to the next, with room for the strip if there is anything to show."""
    return LANE + GAP + (STRIP if scale.peak else 0.0)


def _opening(width: float, height: float, scale: Scale, panels: Sequence[tuple[str, Events]]) -> list[str]:
    gist = "; ".join(_gist(title, timeline) for title, timeline in panels)
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gpipe-timeline" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escaped(gist)}" '
        f'data-span="{scale.span!r}" data-width="{scale.width!r}" data-digits="{scale.digits}" '
        f'data-unit="{escaped(scale.unit)}">',
        f"<style>{_STYLE}</style>",
        '<rect class="paper" width="100%" height="100%" rx="8"/>',
    ]


def _gist(title: str, timeline: Events) -> str:
    return f"{title}: {heading(timeline)}" if title else heading(timeline)


def _panel(title: str, timeline: Events, scale: Scale, y: float) -> Iterator[str]:
    yield _text(LEFT, y + 18, _gist(title, timeline), "gist")
    yield _text(LEFT + scale.width + 8, y + 18, "busy", "faint")
    busy, begin = timeline.utilisation, timeline.start
    for row, (worker, lane) in enumerate(timeline.lanes.items()):
        top = y + TOP + row * _pitch(scale)
        stages = sorted({event.stage for event in lane})
        yield from _names(worker, stages, lane[0].device, top)
        yield _text(LEFT + scale.width + 8, top + LANE / 2 + 4, format_share(busy[worker]))
        held = [(moment - begin, size) for moment, size in timeline.held(*stages)]
        yield from _plot(lane, begin, stages, scale, top, _strip(held, scale) if scale.peak and held else "")
        if scale.peak and held:
            most = max(size for _, size in held)
            yield _text(LEFT + scale.width + 8, top + LANE + STRIP - 3, format_bytes(most), "faint")


def _most(timeline: Events) -> int:
    """The most bytes that any worker keeps."""
    stages = [{event.stage for event in lane} for lane in timeline.lanes.values()]
    return max((size for own in stages for _, size in timeline.held(*own)), default=0)


def _names(worker: int, stages: Sequence[int], device: str, top: float) -> Iterator[str]:
    alone = stages == [worker]
    yield _text(LEFT - 10, top + 13, f"stage {worker}" if alone else f"worker {worker}", "end")
    below = device if alone else f"stages {', '.join(map(str, stages))}"
    yield _text(LEFT - 10, top + 26, below, "faint end")


def _plot(
    lane: Sequence[Event], begin: float, stages: Sequence[int], scale: Scale, top: float, strip: str
) -> Iterator[str]:
    """The part of a page that scrolls and zooms. Zooming stretches ``time``, and the numbers are updated."""
    height = LANE + (STRIP if strip else 0.0)
    yield f'<svg class="plot" x="{LEFT:g}" y="{top:g}" width="{scale.width:g}" height="{height:g}">'
    yield f'<rect class="idle" width="{scale.width:g}" height="{LANE:g}"/><g class="grid">{_grid(scale)}</g>'
    yield '<g class="time">'
    yield from (_cell(event, begin, stages, scale) for event in lane)
    yield f'{strip}</g><g class="numbers">'
    yield from (number for event in lane for number in _number(event, begin, scale))
    yield "</g></svg>"


def _cell(event: Event, begin: float, stages: Sequence[int], scale: Scale) -> str:
    x, width = scale.x(event.start - begin), scale.x(event.seconds)
    fill = _paler(COLOURS[event.kind], stages.index(event.stage) / len(stages))
    # The white line around a narrow cell would cover it, and a busy worker look idle.
    line = ' style="stroke:none"' if width < NARROW else ""
    return (
        f'<rect class="cell"{line} x="{x:.2f}" width="{width:.2f}" height="{LANE:g}" fill="{fill}" '
        f'data-i="{event.microbatch}" data-letter="{event.kind.letter}">'
        f"<title>{escaped(describe(event, begin, scale.unit))}</title></rect>"
    )


def describe(event: Event, begin: float, unit: str = SECONDS) -> str:
    """What people want to know of a cell, line by line."""
    facts = [
        ("stage", f"{event.stage} ({event.layers})" if event.layers else str(event.stage)),
        ("micro-batch", str(event.microbatch)),
        ("kind", event.kind.label),
        ("device", event.device),
        ("start", _moment(event.start - begin, unit)),
        ("duration", duration(event.seconds, unit)),
        ("waited", duration(event.wait, unit)),
        ("moved", format_bytes(event.bytes_moved)),
    ]
    held = [] if event.held_bytes is None else [("kept after", format_bytes(event.held_bytes))]
    return "\n".join(f"{name}: {value}" for name, value in (*facts, *held))


def _moment(time: float, unit: str) -> str:
    factor, unit = time_unit(time) if unit == SECONDS and time else (1.0, unit)
    return f"{time / factor:.6g} {unit}"


def _paler(colour: str, share: float) -> str:
    """Stages that share a worker are told apart by how pale they are."""
    channels = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(c + (255 - c) * share * 0.8):02x}" for c in channels)


def _number(event: Event, begin: float, scale: Scale) -> Iterator[str]:
    lines, size = _lines(event.kind.letter, str(event.microbatch), scale.x(event.seconds), scale.digits)
    x, y = scale.x((event.start + event.end) / 2 - begin), LANE / 2 + size * (0.86 - len(lines) / 2)
    if lines:
        written = "".join(f'<tspan x="{x:.2f}" y="{y + k * size:.1f}">{line}</tspan>' for k, line in enumerate(lines))
        yield f'<text class="number" font-size="{size:.1f}">{written}</text>'


def _lines(letter: str, number: str, width: float, digits: int) -> tuple[list[str], float]:
    """What a cell says and in which size: first what reads best, at last nothing. The page does the same as it zooms.

    Numbers of fewer digits are treated as the longest, so that cells of one width look the same.
    """
    first = 1.6 if letter == "W" else 1.0  # a W is that wide
    for lines, letters, least, most in (
        ([letter + number], first + digits, 8.5, 10.0),
        ([letter, number], max(first, digits), 7.0, 10.0),
        ([letter, *number], first, 6.5, 8.0),
        ([*number], 1.0, 6.5, 8.0),
    ):
        size = min(most, _size(width, letters), LANE / len(lines))
        if size >= least:
            return lines, size
    return [], 0.0


def _size(width: float, letters: float) -> float:
    """The size of type at which so many letters fit."""
    return (width - 2) / (0.62 * letters)


def _strip(held: Sequence[tuple[float, int]], scale: Scale) -> str:
    """The activations kept, as a curve of steps."""
    floor, end = LANE + STRIP, max((moment for moment, _ in held), default=0.0)
    steps = "".join(f"H{scale.x(moment):.2f}V{floor - (STRIP - 2) * size / scale.peak:.2f}" for moment, size in held)
    return f'<path class="held" d="M0 {floor:g}{steps}H{scale.x(end):.2f}V{floor:g}Z"/>'


def _grid(scale: Scale) -> str:
    xs = [scale.x(seconds) for seconds, _ in _ticks(scale.span, scale.unit)]
    return "".join(f'<line x1="{x:.2f}" x2="{x:.2f}" y2="{LANE:g}"/>' for x in xs)


def _axis(scale: Scale, y: float) -> Iterator[str]:
    yield f'<g class="axis" transform="translate({LEFT:g} {y:g})">'
    for seconds, label in _ticks(scale.span, scale.unit):
        yield _text(scale.x(seconds), 10, label, "faint middle")
    yield "</g>"


def _ticks(span: float, unit: str) -> list[tuple[float, str]]:
    """Up to ten round times, the last of them with the unit."""
    if span <= 0:
        return [(0.0, f"0 {unit}")]
    factor, unit = time_unit(span) if unit == SECONDS else (1.0, unit)
    step = next(
        step for e in range(-3, 30) for step in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if span / factor / step <= 10
    )
    times = [i * step for i in range(math.floor(span / factor / step + 1e-9) + 1)]
    return [(t * factor, f"{t:.10g} {unit}" if t == times[-1] else f"{t:.10g}") for t in times]


def _legend(panels: Sequence[tuple[str, Events]], scale: Scale, y: float) -> Iterator[str]:
    x = LEFT
    present = {kind for _, timeline in panels for kind in kinds_in(timeline)}
    for kind in (kind for kind in COLOURS if kind in present):
        yield f'<rect x="{x:g}" y="{y:g}" width="12" height="12" rx="2" fill="{COLOURS[kind]}"/>'
        yield _text(x + 17, y + 10, kind.label)
        x += 34 + 5.8 * len(kind.label)
    yield _text(LEFT, y + 10 + NOTES, "; ".join(_notes(panels, scale)), "faint")


def _notes(panels: Sequence[tuple[str, Events]], scale: Scale) -> Iterator[str]:
    yield "grey: idle"
    timelines = [timeline for _, timeline in panels]
    if any(len({event.stage for event in lane}) > 1 for t in timelines for lane in t.lanes.values()):
        yield "paler: later stages of the worker"
    if scale.peak:
        yield f"below: activations kept, up to {format_bytes(scale.peak)}"


def _text(x: float, y: float, what: str, style: str = "") -> str:
    classes = f' class="{style}"' if style else ""
    return f'<text{classes} x="{x:.2f}" y="{y:.2f}">{escaped(what)}</text>'
