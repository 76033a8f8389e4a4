"""Reports saved as what the ending of a file's name says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path


def save(path: str | PathLike[str], forms: Mapping[str, Callable[[], str]]) -> None:
    """Write the form that belongs to the ending of ``path``.

    Args:
        path: of the file, which is replaced if it is there.
        forms: for each ending what makes the text.

    Raises:
        ValueError: another ending; nothing is written.
    """
    file = Path(fspath(path))
    if file.suffix not in forms:
        *others, last = forms
        raise ValueError(
            f"path: expected a name that ends in {', '.join(others)} or {last}, got the ending {file.suffix!r}"
        )
    file.write_text(forms[file.suffix](), encoding="utf-8")
