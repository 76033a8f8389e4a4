"""A timeline as a page of its own, which needs nothing from anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .._template import filled
from ._events import Events
from ._svg import svg


def html(panels: Sequence[tuple[str, Events]]) -> str:
    """The picture in a page: hovering shows the action and its micro-batch, the wheel zooms, dragging moves."""
    title = " and ".join(title for title, _ in panels if title) or "timeline"
    return filled(__package__, {"title": escape(title), "picture": svg(panels)})
