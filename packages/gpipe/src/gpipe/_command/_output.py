"""The output of commands: files and text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from ..timeline import Timeline
from ..timeline._chrome import trace


def save(path: str, write: Callable[[Path], object]) -> None:
    """Have ``write`` make the file ``path``. An existing file is replaced only when the new one is complete.

    Args:
        path: of the file.
        write: makes the file whose path it is called with, which has the same ending.

    Raises:
        ValueError: it cannot be written.
    """
    target = Path(path)
    try:
        # Beside it, since only on one disk a file can take the place of another at once.
        with TemporaryDirectory(dir=target.parent, prefix=".gpipe-") as folder:
            draft = Path(folder) / target.name
            write(draft)
            os.replace(draft, target)
    except OSError as error:
        raise ValueError(f"cannot write {path!r}: {error.strerror}") from error


def show(found: Timeline, json: bool, html: str | None) -> None:
    """Print a timeline, and save it as a page if there is a place for it.

    Args:
        found: the timeline.
        json: whether to print a trace instead of a table.
        html: the path of the page; None for no page.

    Raises:
        ValueError: the page cannot be written.
    """
    print(trace(found) if json else found)
    if html is not None:
        save(html, found.save)
