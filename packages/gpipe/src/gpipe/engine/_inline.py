"""Walk the programs on the caller's own thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_inline: ContextVar[bool] = ContextVar("gpipe.inline", default=False)


@contextmanager
def inline() -> Iterator[None]:
    """Inside, every pipe runs the same programs on the calling thread, in an order in which nothing waits.

    For ``breakpoint()`` in a layer, profilers that see one thread only, and tests that want one order of events. A
    backward runs inline if its forward did.

    >>> with inline():
    ...     is_inline()
    True
    """
    token = _inline.set(True)
    try:
        yield
    finally:
        _inline.reset(token)


def is_inline() -> bool:
    """Whether a run that starts here and now is walked on this thread."""
    return _inline.get()
