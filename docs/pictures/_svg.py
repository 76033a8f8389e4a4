"""The elements of SVG pictures."""

from __future__ import annotations

from gpipe._page import escape_xml

INK, FAINT, PAPER, GROUND, RULE = "#1f2937", "#667085", "#ffffff", "#eef0f3", "#d0d5dd"
FORWARD, BACKWARD = "#7fb0f2", "#6fc793"

DARK = {INK: "#e5e7eb", FAINT: "#9aa4b2", PAPER: "#14181f", GROUND: "#232a35", RULE: "#344054"}
"""For each colour the one that replaces it if the reader prefers dark."""


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A filled rectangle.

    Args:
        x, y: the upper left corner, in pixels.
        width, height: the size, in pixels.
        fill: a colour.
        title: the tooltip in a browser.

    Returns:
        The element.
    """
    inside = f"<title>{escape_xml(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}">{inside}</rect>'


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
    """Words on one line.

    Args:
        x, y: the point of the base line that `anchor` names, in pixels.
        words: the text, which is escaped.
        anchor: ``start``, ``middle`` or ``end``.
        size: the font size, in pixels.
        color: the colour of the letters.
        bold: whether letters are bold.
        turn: a rotation in degrees, clockwise.

    Returns:
        The element.
    """
    weight = ' font-weight="bold"' if bold else ""
    rotate = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}"{weight}{rotate}>'
        f"{escape_xml(words)}</text>"
    )
