"""What distinguishes the trees of values, in a microsecond or two: a key by which their forms are looked up."""

from __future__ import annotations

from types import EllipsisType, NoneType
from typing import Any

from torch import Tensor

from microbatch import Arguments


class UnkeyedError(Exception):
    """A value for which there is no such key."""


def skeleton(value: Any) -> Any:
    """Equal for values of the same types with the same constants, whatever their tensors are.

    Raises:
        UnkeyedError: there are other types in it than tensors, tuples, lists, dicts, :class:`microbatch.Arguments`
            and plain constants.
    """
    kind = type(value)
    if kind is Tensor:
        return None
    if kind is tuple or kind is list or kind is Arguments:
        return kind, *map(skeleton, value)
    if kind is dict:
        return kind, *map(_constant, value), *map(skeleton, value.values())
    return None if isinstance(value, Tensor) else _constant(value)


def _constant(value: Any) -> Any:
    """With its type, as 1 == True."""
    kind = type(value)
    if kind not in _CONSTANTS:
        raise UnkeyedError
    return kind, value


_CONSTANTS = frozenset({NoneType, EllipsisType, bool, int, str, bytes})
