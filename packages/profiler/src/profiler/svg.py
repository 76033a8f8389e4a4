"""The elements of SVG that pictures are made of."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape

__all__ = ["INK", "escaped", "line", "rect", "text"]

INK = "#1a202c"
_FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escaped(text: str) -> str:
    """Fit for an element or an attribute; characters that XML forbids even escaped are replaced.

    >>> escaped('a < "b"')
    'a &lt; &quot;b&quot;'
    """
    return escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text), {'"': "&quot;"})


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inside = f"<title>{escaped(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">{inside}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, dash: str = "none") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-dasharray="{dash}"/>'
    )


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "middle",
    size: int = 11,
    color: str = INK,
    bold: bool = False,
    turn: int = 0,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    rotate = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}"{weight}{rotate}>'
        f"{escaped(words)}</text>"
    )
