"""Whether the calling layer runs in a forward that will be repeated, or in its repetition.

The first forward of a checkpointed cell runs like any other and then lets its graph go. It does not run under
``no_grad``: torch chooses other kernels there, and the recomputation would build the graph of a computation that
never happened.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Phase(threading.local):
    checkpointing = False
    recomputing = False


_phase = _Phase()


def is_checkpointing() -> bool:
    """Whether the calling layer runs in a forward whose graph will be rebuilt later."""
    return _phase.checkpointing


def is_recomputing() -> bool:
    """Whether the calling layer runs in a recomputation. Layers that count or log may want to skip it."""
    return _phase.recomputing


@contextmanager
def checkpointing() -> Iterator[None]:
    """Inside, :func:`is_checkpointing` is true on this thread."""
    before, _phase.checkpointing = _phase.checkpointing, True
    try:
        yield
    finally:
        _phase.checkpointing = before


@contextmanager
def recomputing() -> Iterator[None]:
    """Inside, :func:`is_recomputing` is true on this thread."""
    before, _phase.recomputing = _phase.recomputing, True
    try:
        yield
    finally:
        _phase.recomputing = before
