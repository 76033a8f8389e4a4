"""The actions of one stage in order, as generators: long schedules need not be in memory.

Each action is a pair of kind and micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from ._actions import Kind

Order = Iterator[tuple[Kind, int]]

_F, _R, _B, _I, _W = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def drained(microbatches: int, stop: int) -> Order:
    """All forwards, then all backwards in reverse; micro-batches below ``stop`` are recomputed before that."""
    for i in range(microbatches):
        yield _F, i
    for i in reversed(range(microbatches)):
        if i < stop:
            yield _R, i
        yield _B, i


def one_by_one(microbatches: int, in_flight: int, stop: int) -> Order:
    """``in_flight`` forwards at most in advance, then backwards and forwards in turn."""
    ahead = min(in_flight, microbatches)
    for i in range(ahead):
        yield _F, i
    for i in range(microbatches):
        if i < stop:
            yield _R, i
        yield _B, i
        if i + ahead < microbatches:
            yield _F, i + ahead


def split_one_by_one(microbatches: int, in_flight: int, late: int, stop: int) -> Order:
    """The same actions with split backwards; those for the weights come ``late`` micro-batches later."""
    ahead = min(in_flight, microbatches)
    for i in range(ahead):
        yield _F, i
    for i in range(microbatches):
        if i < stop:
            yield _R, i
        yield _I, i
        if i >= late:
            yield _W, i - late
        if i + ahead < microbatches:
            yield _F, i + ahead
    for i in range(max(0, microbatches - late), microbatches):
        yield _W, i
