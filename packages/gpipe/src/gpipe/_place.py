"""Where in a run the calling layer is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Here(threading.local):
    microbatch: tuple[int, int] | None = None


_here = _Here()


def microbatch() -> tuple[int, int] | None:
    """The micro-batch that the calling layer works on, and how many there are; None outside a pipe."""
    return _here.microbatch


@contextmanager
def at(i: int, microbatches: int) -> Iterator[None]:
    """Inside, this thread works on micro-batch ``i`` of ``microbatches``."""
    before, _here.microbatch = _here.microbatch, (i, microbatches)
    try:
        yield
    finally:
        _here.microbatch = before
