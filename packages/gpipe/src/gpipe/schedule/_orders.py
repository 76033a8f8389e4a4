"""The actions of one stage in order, made while they are read: long schedules need not be kept.

Each is a pair of kind and micro-batch, as an action is.
"""

from __future__ import annotations

from collections.abc import Iterator

from ._actions import Kind

Order = Iterator[tuple[Kind, int]]

_F, _R, _B, _I, _W = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def drained(microbatches: int, stop: int) -> Order:
    """All forwards, then all backwards in reverse; micro-batches below ``stop`` are recomputed before."""
    for i in range(microbatches):
        yield _F, i
    for i in reversed(range(microbatches)):
        if i < stop:
            yield _R, i
        yield _B, i


def one_by_one(microbatches: int, in_flight: int, stop: int) -> Order:
    """At most ``in_flight`` forwards ahead, then backward and forward in turn."""
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
    """The same with backwards in two parts, those for the weights ``late`` micro-batches behind."""
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
