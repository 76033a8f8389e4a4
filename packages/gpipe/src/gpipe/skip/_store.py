"""Where a layer's skips go to and come from."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from .._current import current, setting
from ._namespace import Namespace

Key = tuple[Namespace | None, str]
"""A skip: its namespace, if any, and its name there."""


class Store(Protocol):
    """Holds what has been stashed and not popped yet. A ``dict`` is one."""

    def __setitem__(self, key: Key, value: Tensor | None, /) -> None: ...

    def pop(self, key: Key, /) -> Tensor | None: ...


def current_store() -> Store:
    """The store of this thread: that of the innermost :func:`routed` block, or one that serves plain modules."""
    return current.skips


def routed(store: Store) -> AbstractContextManager[None]:
    """Inside, layers on this thread stash to ``store`` and pop from it."""
    return setting(skips=store)
