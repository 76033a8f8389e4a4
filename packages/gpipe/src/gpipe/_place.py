"""Where in a run the calling layer is."""

from __future__ import annotations

import threading


class _Here(threading.local):
    microbatch: tuple[int, int] | None = None


_here = _Here()


def microbatch() -> tuple[int, int] | None:
    """The micro-batch that the calling layer works on, and how many there are; None outside a pipe."""
    return _here.microbatch


class At:
    """A block in which this thread works on micro-batch ``i`` of ``microbatches``."""

    __slots__ = ("_before", "_now")

    def __init__(self, i: int, microbatches: int) -> None:
        self._now = i, microbatches

    def __enter__(self) -> None:
        self._before, _here.microbatch = _here.microbatch, self._now

    def __exit__(self, *_: object) -> None:
        _here.microbatch = self._before
