"""Select the part of the model's output that a pipe returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Pick = Callable[[Any], Any]
"""Returns a part of an output."""


def picker(pick: str | Pick | None) -> Pick:
    """Return the function for ``pick``: the name of a field, a function, or None for the output itself.

    Raises:
        TypeError: ``pick`` has a different type.
    """
    if pick is None:
        return _all
    if isinstance(pick, str):
        return partial(_field, pick)
    if not callable(pick):
        raise TypeError(f"pick must be the name of a field of what the model returns, or a function; got {pick!r}")
    return pick


def _all(output: Any) -> Any:
    return output


def _field(name: str, output: Any) -> Any:
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if found is None:
        fields = f"with the fields {', '.join(map(str, output))}" if isinstance(output, Mapping) else "without it"
        raise ValueError(f"pick={name!r} names no field of the output, a {type(output).__name__} {fields}")
    return found
