"""A timeline as a page of its own, which needs nothing from anywhere else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from ._events import Events
from ._svg import svg


def html(panels: Sequence[tuple[str, Events]]) -> str:
    """The picture in a page: hovering shows the action and its micro-batch, the wheel zooms, dragging moves."""
    page = files(__package__).joinpath("_page.html").read_text(encoding="utf-8")
    title = " and ".join(title for title, _ in panels if title) or "timeline"
    parts = {"title": escape(title), "picture": svg(panels)}
    return re.sub(r"\{\{(\w+)\}\}", lambda blank: parts[blank[1]], page)
