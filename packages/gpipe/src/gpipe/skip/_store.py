"""Where a layer's skips go to and come from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from ._namespace import Namespace

Key = tuple[Namespace | None, str]
"""A skip: its namespace, if any, and its name there."""


class Store(Protocol):
    """Holds what has been stashed and not popped yet. A ``dict`` is one."""

    def __setitem__(self, key: Key, value: Tensor | None, /) -> None: ...

    def pop(self, key: Key, /) -> Tensor | None: ...


class _Current(threading.local):
    def __init__(self) -> None:
        self.store: Store = {}


_current = _Current()


def current_store() -> Store:
    """The store of this thread: that of the innermost :func:`routed` block, or one that serves plain modules."""
    return _current.store


@contextmanager
def routed(store: Store) -> Iterator[None]:
    """Inside, layers on this thread stash to ``store`` and pop from it."""
    before, _current.store = _current.store, store
    try:
        yield
    finally:
        _current.store = before
