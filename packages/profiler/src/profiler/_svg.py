"""The marks of an SVG that a chart is made of."""

from __future__ import annotations

from xml.sax.saxutils import escape

INK = "#1a202c"


def escaped(text: str) -> str:
    """XML knows no control characters, not even escaped ones."""
    return escape("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text))


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
