"""The context variables of a thread."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context as Variables
from contextvars import ContextVar, Token
from contextvars import copy_context as read
from typing import Any

__all__ = ["Variables", "enter", "read"]

_UNSET = object()


def enter(variables: Variables) -> Callable[[], None] | None:
    """Set the ``variables`` on this thread, others stay; the way back, or ``None`` if there was nothing to change.

    One by one, because a ``contextvars.Context`` cannot be entered by two threads at a time.
    """
    tokens = [(var, var.set(value)) for var, value in variables.items() if var.get(_UNSET) is not value]
    return (lambda: _reset(tokens)) if tokens else None


def _reset(tokens: list[tuple[ContextVar[Any], Token[Any]]]) -> None:
    for var, token in reversed(tokens):
        var.reset(token)
