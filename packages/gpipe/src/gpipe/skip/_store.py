"""The stores of skips."""

from __future__ import annotations

from contextlib import AbstractContextManager

from .._current import Store as Store
from .._current import current, setting
from ._namespace import Namespace

Key = tuple[Namespace | None, str]
"""A skip: its namespace, if any, and its name there."""


def current_store() -> Store:
    return current.skips


def routed(store: Store) -> AbstractContextManager[None]:
    """A context in which layers on this thread stash to ``store`` and pop from it."""
    return setting(skips=store)
