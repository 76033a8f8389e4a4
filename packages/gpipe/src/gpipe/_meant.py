"""Suggest the name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about ``name`` if it resembles one of ``names``, else an empty string.

    >>> did_you_mean("Alwys", ["always", "never"])
    "; did you mean 'always'?"
    """
    close = difflib.get_close_matches(name.strip().lower(), names, 1)
    return f"; did you mean {close[0]!r}?" if close else ""
