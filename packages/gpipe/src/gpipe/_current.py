"""Which micro-batch the calling thread works on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._batchnorm import MiniBatchStatistics


class At:
    """A block in which this thread works on a micro-batch.

    Args:
        microbatch: its index in the mini-batch.
        statistics: what batch norm has seen of the mini-batch so far. None in a recomputation or a backward, in which
            a layer may run again, and must not count its input twice.
    """

    __slots__ = ("_before", "microbatch", "statistics")

    def __init__(self, microbatch: int, statistics: MiniBatchStatistics | None = None) -> None:
        self.microbatch = microbatch
        self.statistics = statistics

    def __enter__(self) -> None:
        self._before, _here.place = _here.place, self

    def __exit__(self, *_: object) -> None:
        _here.place = self._before


class _Here(threading.local):
    place: At | None = None


_here = _Here()


def place() -> At | None:
    """The innermost block that this thread is in; None outside of a pipe."""
    return _here.place
