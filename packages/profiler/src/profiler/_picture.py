"""A profile as a bar chart in SVG: a line for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from .svg import BACKWARD, DARK, FORWARD, GROUND, INK, PAPER, line, rect, text
from .text import format_cost

if TYPE_CHECKING:
    from ._data import LayerProfile, ProfileData

_TOP, _PITCH, _BAR, _LOAD = 52.0, 18.0, 420.0, 70.0
"""Pixels above the first layer, from layer to layer, of the longest bar, and for a figure beside it."""
_CUT = "#c53030"
# Attributes have the light colours, which every viewer shows; rules of CSS override attributes where they are
# supported.
_STYLE = "".join(
    f'.gpipe-profile[fill="{light}"], .gpipe-profile [fill="{light}"] {{ fill: {dark} }}\n'
    f'.gpipe-profile [stroke="{light}"] {{ stroke: {dark} }}\n'
    for light, dark in (DARK | {_CUT: "#f28b82"}).items()
)
# Smaller costs can only be rounding errors, and the sum of larger ones overflows.
_LEAST, _MOST = 1e-15, 1e300


def picture(profile: ProfileData, balance: Sequence[int] | None, by: str) -> str:
    """See `Profile.picture`."""
    if balance is not None and (sum(balance) != len(profile) or min(balance, default=1) < 1):
        raise ValueError(
            f"balance: expected positive numbers that sum up to {len(profile)} layers, got {list(balance)}"
        )
    costs = profile.costs(by)
    left = 20 + 6.2 * max(map(len, map(_label, profile)))
    width, height = left + _BAR + (2 if balance else 1) * _LOAD, _TOP + _PITCH * len(profile) + 10
    body = [
        *_partitions(balance or [], costs, left, by),
        *(
            mark
            for i, cost in enumerate(costs)
            for mark in _bar(profile[i], cost, max(costs), left, _TOP + _PITCH * i, by)
        ),
        *_heading(profile, by),
    ]
    return "\n".join([_open(max(width, 420), height), *body, "</svg>", ""])


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
    marks = [text(10, 20, title, size=13, anchor="start")]
    for i, (color, label) in enumerate(legend):
        marks += [rect(10 + 84 * i, 29, 10, 10, color), text(24 + 84 * i, 38, label, anchor="start")]
    return marks


def _label(layer: LayerProfile) -> str:
    return f"{layer.name} {layer.kind}"[:40]


def _bar(layer: LayerProfile, cost: float, most: float, x: float, y: float, by: str) -> list[str]:
    parts = [(FORWARD, cost)]
    if by == "seconds":
        parts = [(FORWARD, layer.forward_seconds or 0.0), (BACKWARD, layer.backward_seconds or 0.0)]
    marks = [text(x - 6, y + 13, _label(layer), anchor="end")]
    for color, part in parts:
        width = _BAR * part / most if _LEAST < most < _MOST else 0.0
        marks.append(rect(x, y + 3, width, _PITCH - 6, color, f"{layer.name} ({layer.kind}): {format_cost(part, by)}"))
        x += width
    return [*marks, text(x + 5, y + 13, format_cost(cost, by), anchor="start")]


def _partitions(balance: Sequence[int], costs: list[float], left: float, by: str) -> list[str]:
    """Alternate shades for the partitions, their loads at the right (the bottleneck in bold), and lines at the cuts."""
    bounds = list(pairwise(accumulate(balance, initial=0)))
    loads, right = [sum(costs[start:end]) for start, end in bounds], left + _BAR + 2 * _LOAD
    marks = []
    for j, ((start, end), load) in enumerate(zip(bounds, loads, strict=True)):
        top, bottom = _TOP + _PITCH * start, _TOP + _PITCH * end
        if j % 2 == 0:
            marks.append(rect(0, top, right, bottom - top, GROUND))
        if j > 0:
            marks.append(line(0, top, right, top, _CUT, dash="5 3"))
        bold = load == max(loads)
        marks.append(text(right - 8, top + 13, format_cost(load, by), anchor="end", color=_CUT, bold=bold))
    return marks
