"""What the objects in attributes of layers contain, compared around a recomputation.

Numbers, flags and tensors in attributes are restored (:mod:`gpipe.checkpoint._state`). Other objects are not: a list to
which the forward appends, a counter in a dict or in NumPy. A recomputation that changes them again would count twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, TypeAlias

from torch import Tensor, nn

from ._snapshot import CONSTANTS, OF_ANY_MODULE, may_keep

Contents: TypeAlias = dict[tuple[nn.Module, str], Any]
"""By module and attribute, something that is equal as long as the object there contains the same."""

_DEPTH = 4
_FOREIGN = ("torch", "threading", "_thread", "weakref", "logging", "types", "functools")
"""Packages whose objects are not looked into: what they keep has no part in what a layer computes."""


def contents_of(modules: Iterable[nn.Module]) -> Contents:
    """The contents of all objects in attributes of ``modules``, but for those of modules of torch."""
    seen: dict[int, Any] = {}
    return {
        (module, name): _contents(value, seen, _DEPTH)
        for module in modules
        if may_keep(module)
        for name, value in list(vars(module).items())
        if name not in OF_ANY_MODULE and type(value) not in CONSTANTS
    }


def changed(before: Contents, after: Contents) -> list[tuple[nn.Module, str]]:
    """The modules and attributes of those objects that contain something else now."""
    return [place for place in after if place in before and before[place] != after[place]]


def _contents(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """A description of ``value``. A tensor is described by being one: each recomputation makes tensors of its own."""
    kind = type(value)
    if kind in CONSTANTS:
        return kind, repr(value)  # not the value itself: not-a-number differs from itself
    if depth == 0 or isinstance(value, (Tensor, nn.Module, type)) or callable(value):
        return kind
    if id(value) not in seen:
        seen[id(value)] = kind  # ends a cycle
        seen[id(value)] = kind, *_parts(value, seen, depth - 1)
    return seen[id(value)]


def _parts(value: Any, seen: dict[int, Any], depth: int) -> Iterator[Any]:
    package = type(value).__module__.partition(".")[0]
    if isinstance(value, Mapping):
        yield from (_contents(part, seen, depth) for item in list(value.items()) for part in item)
    elif isinstance(value, (list, tuple)):
        yield from (_contents(part, seen, depth) for part in list(value))
    elif isinstance(value, Set):
        yield len(value)
    elif package == "numpy":
        yield value.tobytes() if hasattr(value, "tobytes") else None
    elif hasattr(value, "__dict__") and package not in _FOREIGN:
        yield from _parts(vars(value), seen, depth)
    elif package not in _FOREIGN:
        yield None if "__repr__" not in vars(type(value)) else repr(value)  # numbers, and objects of C
