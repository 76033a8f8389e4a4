"""A profile as a bar chart in SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from .svg import BACKWARD, DARK, FORWARD, GROUND, INK, PAPER, RULE, line, rect, text
from .text import format_cost

if TYPE_CHECKING:
    from ._data import LayerProfile, ProfileData

_TOP, _LEFT, _RIGHT, _HEIGHT = 72.0, 78.0, 18.0, 240.0
_CUT = "#c53030"
# Attributes have the light colours, which every viewer shows; rules of CSS override attributes where they are
# supported.
_STYLE = "".join(
    f'.gpipe-profile[fill="{light}"], .gpipe-profile [fill="{light}"] {{ fill: {dark} }}\n'
    f'.gpipe-profile [stroke="{light}"] {{ stroke: {dark} }}\n'
    for light, dark in (DARK | {_CUT: "#f28b82"}).items()
)


class _Chart(NamedTuple):
    """The geometry of a chart: `pitch` pixels from bar to bar, `top` the cost at the upper edge."""

    layers: int
    pitch: float
    top: float

    def x(self, layer: float) -> float:
        return _LEFT + layer * self.pitch

    def y(self, cost: float) -> float:
        return _TOP + _HEIGHT * (1 - cost / self.top)

    @property
    def width(self) -> float:
        return self.x(self.layers) + _RIGHT


# Smaller costs can only be rounding errors; dividing by them would overflow.
_NOTHING = 1e-15


def picture(profile: ProfileData, balance: Sequence[int] | None, by: str) -> str:
    """See `Profile.picture`."""
    costs = profile.costs(by)
    step = _step(max(costs, default=0), 1024 if by.endswith("bytes") else 10)
    ticks = max(1, math.ceil(max(costs, default=0) / step))
    chart = _Chart(len(profile), min(64.0, max(9.0, 660 / max(1, len(profile)))), ticks * step)
    body = [
        *_bands(chart, costs, _checked(balance, len(profile)), by),
        *_axis(chart, [i * step for i in range(ticks + 1)], by),
        *(mark for i, layer in enumerate(profile) for mark in _bar(chart, i, layer, by)),
        *_names(profile, chart),
        *_heading(profile, by),
    ]
    height = _TOP + _HEIGHT + _room_below(profile)
    return "\n".join([_open(max(chart.width, 420), height), *body, "</svg>", ""])


def _checked(balance: Sequence[int] | None, layers: int) -> list[int]:
    if balance is None:
        return []
    if sum(balance) != layers or min(balance, default=1) < 1:
        raise ValueError(f"balance: expected positive numbers that sum up to {layers} layers, got {list(balance)}")
    return list(balance)


def _step(most: float, base: int) -> float:
    """A round distance for three to five grid lines."""
    if most < _NOTHING:
        return 1.0
    unit = float(base ** math.floor(math.log(most, base)))
    power = 10.0 ** math.floor(math.log10(most / unit / 5))
    return next(factor * power * unit for factor in (1, 2, 5, 10, 20) if factor * power * unit * 5 >= most)


def _open(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" class="gpipe-profile" role="img" fill="{INK}" font-size="11" '
        f'font-family="ui-sans-serif, system-ui, sans-serif">\n'
        f"<style>@media (prefers-color-scheme: dark) {{\n{_STYLE}}}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>'
    )


def _heading(profile: ProfileData, by: str) -> list[str]:
    title = f"{by.replace('_', ' ')} of {len(profile)} layers, micro-batch of {profile.rows} rows, {profile.device}"
    legend = ((FORWARD, "forward"), (BACKWARD, "backward")) if by == "seconds" else ()
    marks = [text(_LEFT, 20, title, size=13, anchor="start")]
    for i, (color, label) in enumerate(legend):
        x = _LEFT + 84 * i
        marks += [rect(x, 29, 10, 10, color), text(x + 14, 38, label, anchor="start")]
    return marks


def _axis(chart: _Chart, ticks: list[float], by: str) -> list[str]:
    right = chart.x(chart.layers)
    return [
        mark
        for tick in ticks
        for mark in (
            line(_LEFT, chart.y(tick), right, chart.y(tick), RULE),
            text(_LEFT - 6, chart.y(tick) + 4, format_cost(tick, by), anchor="end"),
        )
    ]


def _bands(chart: _Chart, costs: list[float], balance: list[int], by: str) -> list[str]:
    """Alternate shades for the partitions, their loads above (the bottleneck in bold), and lines at the cuts."""
    ends = [0, *accumulate(balance)]
    loads = [sum(costs[start:end]) for start, end in pairwise(ends)]
    crowded = min(balance, default=0) * chart.pitch < 60
    marks = []
    for j, ((start, end), load) in enumerate(zip(pairwise(ends), loads, strict=True)):
        if j % 2 == 0:
            marks.append(rect(chart.x(start), _TOP, chart.x(end) - chart.x(start), _HEIGHT, GROUND))
        if j > 0:
            marks.append(line(chart.x(start), _TOP - 14, chart.x(start), _TOP + _HEIGHT + 4, _CUT, dash="5 3"))
        middle = (chart.x(start) + chart.x(end)) / 2
        lift = 14 if crowded and j % 2 else 0
        marks.append(text(middle, _TOP - 5 - lift, format_cost(load, by), color=_CUT, bold=load == max(loads)))
    return marks


def _bar(chart: _Chart, index: int, layer: LayerProfile, by: str) -> list[str]:
    parts = _parts(layer, by)
    x, width = chart.x(index) + 0.12 * chart.pitch, 0.76 * chart.pitch
    marks, base = [], 0.0
    for color, cost in parts:
        title = f"{layer.name} ({layer.kind}): {format_cost(cost, by)}"
        marks.append(rect(x, chart.y(base + cost), width, chart.y(base) - chart.y(base + cost), color, title))
        base += cost
    return marks


def _parts(layer: LayerProfile, by: str) -> list[tuple[str, float]]:
    if by == "seconds":
        return [(FORWARD, layer.forward_seconds or 0.0), (BACKWARD, layer.backward_seconds or 0.0)]
    return [(FORWARD, getattr(layer, by))]


def _labels(profile: ProfileData) -> list[str]:
    """The names of layers, with the class if there is room for both."""
    return [layer.name if len(layer.name) > 12 else f"{layer.name} {layer.kind}"[:28] for layer in profile]


def _room_below(profile: ProfileData) -> float:
    return 26 + 4.4 * max((len(label) for label in _labels(profile)), default=0)


def _names(profile: ProfileData, chart: _Chart) -> list[str]:
    every = math.ceil(13 / chart.pitch)
    y = _TOP + _HEIGHT + 14
    return [
        text(chart.x(i + 0.5) + 3, y, label, anchor="end", turn=-45)
        for i, label in enumerate(_labels(profile))
        if i % every == 0
    ]
