"""Checks of the fields of a result: type and value."""

from __future__ import annotations

from numbers import Real
from typing import Any, SupportsIndex

from ._grid import shown


def integers(values: Any, name: str) -> list[int]:
    """The entries of a tuple of ints; TypeError names the first entry that is not an int."""
    entries = entries_of(values, name)
    for j, value in enumerate(entries):
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError(f"{name}[{j}] must be an int, got {shown(value)} of type {type(value).__name__}")
    return list(map(int, entries))


def entries_of(values: Any, name: str) -> tuple[Any, ...]:
    """The entries of a tuple, or of the list that JSON may have made of it."""
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"{name} must be a tuple, got {shown(values)} of type {type(values).__name__}")
    return tuple(values)


def same(found: Any, expected: Any) -> bool:
    """Whether two numbers, or two tuples of numbers, are equal; True does not equal 1, and NaN equals nothing."""
    if isinstance(expected, tuple):
        return isinstance(found, (tuple, list)) and len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(expected, Real):
        return type(found) is type(expected) and bool(found == expected)
    return isinstance(found, Real) and not isinstance(found, bool) and bool(found == expected)
