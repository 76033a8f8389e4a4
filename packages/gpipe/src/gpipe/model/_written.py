"""Track lists, dicts and dataclasses that pass values from a block to all later blocks, in addition to its output.

A block of a later stage receives copies of these containers, which hold the tensors of its stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ..values._leaves import get_tensors
from ._tree import map_tree

_LISTS = list, deque
_Container = Any
"""A list, a deque, a mutable mapping, or an instance of a dataclass."""
_Entries = list[tuple[Any, Any]]


class Written:
    """The lists, dicts and dataclasses among the arguments of a call of a block.

    Args:
        own: the arguments that the model passes.
        given: the arguments that the block receives.
    """

    def __init__(self, own: Any, given: Any) -> None:
        self._places = [(mine, its, _entries(its)) for mine, its in _pairs(own, given)]
        self._own = {id(its): mine for mine, its, _ in self._places}
        for mine, its, before in self._places:
            inside = dict(_entries(mine))
            self._own.update((id(value), inside[key]) for key, value in before if mine is not its)

    @property
    def is_any(self) -> bool:
        """True if the block has written anything."""
        return any(True for _ in self._changes())

    def end(self, put: Callable[[Tensor], Tensor]) -> bool:
        """Copy the block's changes to the model's own containers, with each new tensor replaced by ``put``.

        Returns:
            Whether the changes are visible only in the written tensors, as new values in a dict or list are.
        """
        is_in_tensors = True
        for mine, its, before, now in [*self._changes()]:
            known = {id(value) for _, value in before}
            found = [
                (key, self._own.get(id(value), value) if id(value) in known else _put(value, put)) for key, value in now
            ]
            places = dict(before)
            written = [value for key, value in now if key not in places or places[key] is not value]
            # A value that was there before, under another key, is not noticed when the model reads it.
            keeps = len(now) == len(before) if isinstance(its, _LISTS) else places.keys() <= dict(now).keys()
            is_in_tensors = is_in_tensors and keeps and all(id(x) not in known and get_tensors(x) for x in written)
            if isinstance(mine, _LISTS):
                mine.clear()
                mine.extend([value for _, value in found])
            elif isinstance(mine, MutableMapping):
                mine.clear()
                mine.update(found)
            else:
                for name, value in found:
                    object.__setattr__(mine, name, value)
        return is_in_tensors

    def _changes(self) -> Iterator[tuple[_Container, _Container, _Entries, _Entries]]:
        for mine, its, before in self._places:
            now = _entries(its)
            if len(now) != len(before) or any(
                a[0] != b[0] or a[1] is not b[1] for a, b in zip(now, before, strict=True)
            ):
                yield mine, its, before, now


def _has_fields(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _put(value: Any, put: Callable[[Tensor], Tensor]) -> Any:
    return map_tree(value, put) if get_tensors(value) else value


def _entries(container: _Container) -> _Entries:
    if isinstance(container, _LISTS):
        return [*enumerate(container)]
    if isinstance(container, MutableMapping):
        return [*container.items()]
    return [(each.name, getattr(container, each.name)) for each in fields(container) if hasattr(container, each.name)]


def _pairs(own: Any, given: Any) -> Iterator[tuple[_Container, _Container]]:
    """Yield each list, dict and dataclass in ``own``, and the one that stands for it in ``given``."""
    if isinstance(own, Tensor):
        return
    if isinstance(own, (*_LISTS, MutableMapping)) or _has_fields(own):
        yield own, given
        for (_, mine), (_, its) in zip(_entries(own), _entries(given), strict=True):
            yield from _pairs(mine, its)
    elif isinstance(own, tuple):
        for mine, its in zip(own, given, strict=True):
            yield from _pairs(mine, its)
