"""A timeline as a page of its own, which needs nothing from anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from .._page import escaped
from ._events import Events
from ._svg import svg


def html(panels: Sequence[tuple[str, Events]]) -> str:
    """The picture in a page: hovering shows the action and its micro-batch, the wheel zooms, dragging moves."""
    title = " and ".join(title for title, _ in panels if title) or "timeline"
    template = files(__package__).joinpath("_page.html").read_text(encoding="utf-8")
    head, _, rest = template.partition("{{title}}")
    body, _, script = rest.partition("{{picture}}")
    return "".join([head, escaped(title), body, svg(panels), script])
