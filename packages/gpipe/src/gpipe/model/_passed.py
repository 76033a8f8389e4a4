"""The lists and dicts among the arguments of a block, to which it may add values for the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Passed:
    """The lists and dicts that a model passes to a block.

    Args:
        given: the arguments of the model.
        own: the same arguments with the tensors of the stage, perhaps in other lists and dicts.
    """

    def __init__(self, given: Any, own: Any) -> None:
        pairs = zip(_containers(given), _containers(own), strict=True)
        self._found = [(theirs, each, _contents(each)) for theirs, each in pairs]

    def follow(self) -> bool:
        """Change those of the model as the block has changed its own. Return whether it has changed any."""
        changed = [(theirs, each) for theirs, each, before in self._found if not _are_same(_contents(each), before)]
        for theirs, each in changed:
            if theirs is not each and isinstance(theirs, list):
                theirs[:] = each
            elif theirs is not each:
                theirs.clear()
                theirs.update(each)
        return bool(changed)


def _containers(value: Any) -> Iterator[Any]:
    kind = type(value)
    if kind is list or kind is dict:
        yield value
    if kind is list or kind is tuple or kind is dict:
        for each in value.values() if kind is dict else value:
            yield from _containers(each)


def _contents(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list) else [*value, *value.values()]


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
