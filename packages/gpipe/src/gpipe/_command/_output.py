"""The output of commands: files and text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console


def expect_writable(path: str | None, *endings: str) -> None:
    """Raise ValueError unless a file can be made at ``path``, before anything is computed for it.

    Args:
        path: of the file; None if there is to be none.
        endings: those that its name may have.
    """
    if path is not None and Path(path).suffix not in endings:
        raise ValueError(f"cannot write {path!r}: expected a file whose name ends in {' or '.join(endings)}")
    if path is not None:
        _beside(Path(path), Path.touch)


def finish(
    found: object,
    json: Callable[[], str] | None,
    path: str | None = None,
    write: Callable[[Path], object] = lambda path: None,
) -> None:
    """Print what a command has found, and save it. An existing file is replaced only when the new one is complete.

    Args:
        found: printed as text, which is wrapped at words where a terminal is narrower.
        json: the text to print instead, if there is one.
        path: of the file; None if there is to be none.
        write: makes the file whose path it is called with, which has the same ending.

    Raises:
        ValueError: the file cannot be written.
    """
    console = Console()
    wide = json is not None or not console.is_terminal
    console.print(json() if json else str(found), markup=False, highlight=False, emoji=False, soft_wrap=wide)
    if path is not None:
        _beside(Path(path), write, keep=True)


def _beside(target: Path, write: Callable[[Path], object], *, keep: bool = False) -> None:
    """Write a draft next to ``target``: on one disk a file can take the place of another at once."""
    try:
        with TemporaryDirectory(dir=target.parent, prefix=".gpipe-") as folder:
            draft = Path(folder) / target.name
            write(draft)
            if keep:
                os.replace(draft, target)
            elif target.is_dir():
                raise IsADirectoryError(None, "it is a folder")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write {str(target)!r}: {getattr(error, 'strerror', error)}") from error
