"""Save reports in the format that the ending of a file's name selects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path


def save(path: str | PathLike[str], forms: Mapping[str, Callable[[], str]]) -> None:
    """Write a report to a file.

    Args:
        path: the file; what it held before is replaced.
        forms: by the ending of a name, such as ``.json``, a function that returns the report in that format.

    Raises:
        ValueError: ``forms`` has no format for the ending of ``path``.
    """
    file = Path(fspath(path))
    if file.suffix not in forms:
        *others, last = forms
        raise ValueError(
            f"path: expected a name that ends in {', '.join(others)} or {last}, got the ending {file.suffix!r}"
        )
    file.write_bytes(forms[file.suffix]().encode())
