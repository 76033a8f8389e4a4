"""Write the output of commands to files and to stdout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console


def expect_writable(path: str | None, *endings: str) -> None:
    """Raise ValueError unless a file can be written at ``path``. Called before anything is computed for it."""
    if path is None:
        return
    if Path(path).suffix not in endings:
        raise ValueError(f"cannot write {path!r}: expected a file whose name ends in {' or '.join(endings)}")
    if Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK):
        raise ValueError(f"cannot write {path!r}: it is a folder, or its folder does not exist or is not writable")


def finish(
    found: object, json: Callable[[], str] | None, path: str | None = None, save: Callable[[str], object] | None = None
) -> None:
    """Print the result of a command, as text or ``json``, and ``save`` it at ``path``, if given."""
    console = Console()
    wide = json is not None or not console.is_terminal
    console.print(json() if json else str(found), markup=False, highlight=False, emoji=False, soft_wrap=wide)
    if path is not None and save is not None:
        save(path)
