"""Replace the tensors in arguments and outputs. A value without replaced tensors remains the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from microbatch import flatten, unflatten

from ..values._constants import is_constant

Change = Callable[[Tensor], Tensor]


def map_tree(value: Any, change: Change) -> Any:
    """Return ``value`` with each tensor replaced by ``change(tensor)``, or ``value`` itself if all stay the same."""
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        found = [map_tree(each, change) for each in value]
        return value if _are_same(found, value) else kind(found)
    if kind is dict:
        found = [map_tree(each, change) for each in value.values()]
        return value if _are_same(found, value.values()) else dict(zip(value, found, strict=True))
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        found = [map_tree(each, change) for each in parts]
        return value if _are_same(found, parts) else slice(*found)
    if is_constant(value):
        return value
    leaves, tree = flatten(value)
    found = [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return value if _are_same(found, leaves) else unflatten(found, tree)


def _are_same(found: list[Any], values: Any) -> bool:
    return all(a is b for a, b in zip(found, values, strict=True))


def is_plain(value: Any) -> bool:
    """Return whether ``value`` consists of tensors and constants, so that all of its tensors can be found."""
    if isinstance(value, Tensor) or is_constant(value):
        return True
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value.values()))
    return all(isinstance(leaf, Tensor) or is_constant(leaf) for leaf in flatten(value)[0])
