"""A timeline: the events of a run, shown as a table, a picture, a page or a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path

from .._page import fragment
from .._saving import save
from ._chrome import read, trace
from ._events import Events
from ._html import html
from ._svg import svg
from ._table import table


class Timeline(Events):
    """The actions of a run: recorded by :func:`gpipe.record`, or predicted by :func:`gpipe.simulate.simulate`.

    ``str()`` is a table with a line for each worker; :meth:`save` draws a picture. Figures are attributes of
    :class:`Events`.
    """

    def table(self) -> str:
        """A line for each worker: its seconds by kind of action, its waiting time, and the bytes that it moved and
        held.
        """
        return table(self)

    def save(self, path: str | PathLike[str], *, title: str = "", beside: Mapping[str, Timeline] | None = None) -> None:
        """Write the timeline to a file, in the format that the ending of ``path`` selects.

        ===========  =====================================================================================
        ``.svg``     a picture
        ``.html``    the picture in a page of its own: hovering shows the action, the wheel zooms
        ``.json``    for https://ui.perfetto.dev and chrome://tracing; :meth:`load` reads it back
        ===========  =====================================================================================

        Args:
            path: the file.
            title: a title above the picture.
            beside: further timelines by title, drawn below on the same scale (pictures and pages only).

        Raises:
            ValueError: ``path`` has another ending.
        """
        panels = [(title, self), *(beside or {}).items()]
        forms: dict[str, Callable[[], str]] = {
            ".svg": lambda: svg(panels),
            ".html": lambda: html(panels),
            ".json": lambda: _trace(panels),
        }
        save(path, forms)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Timeline:
        """The timeline that was saved as ``.json``.

        Args:
            path: the file.

        Returns:
            An equal timeline.

        Raises:
            ValueError: the file is not a timeline.
        """
        events = read(Path(fspath(path)).read_text(encoding="utf-8"))
        return cls(events.events, events.workers, events.unit)

    def __str__(self) -> str:
        return self.table()

    def _repr_svg_(self) -> str:
        return svg([("", self)])

    def _repr_html_(self) -> str:
        # Notebooks show SVG as an image, without tooltips.
        return fragment("", self._repr_svg_())


def _trace(panels: Sequence[tuple[str, Timeline]]) -> str:
    (title, timeline), *beside = panels
    if beside:
        raise ValueError("beside: a .json file holds one timeline; save the others under names of their own")
    return trace(timeline, title)
