"""The steps of each worker: computed once for each size, checkpointing, schedule and placement."""

from __future__ import annotations

import logging
from functools import lru_cache

from ..schedule import Choice, Schedule, Walk, fill_drain, halves, named, validate

Size = tuple[int, tuple[int, ...], tuple[int, ...]]
"""What the order of steps depends on: micro-batches, checkpoint stops, and the worker of each stage."""

_log = logging.getLogger("gpipe")

_WITHOUT_LOOPS = {
    "interleaved": "a '1f1b' that holds more",
    "looped_bfs": "'fill_drain'",
    "interleaved_zero_bubble": "'zero_bubble'",
}
"""The schedule that a schedule with loops becomes where each stage has a worker of its own."""


def walk_of(
    schedule: Schedule | Choice, microbatches: int, checkpoint_stops: tuple[int, ...], placement: tuple[int, ...]
) -> Walk:
    """The steps of each worker under ``schedule``.

    Args:
        schedule: a schedule of the caller's own, or the choice of a named one.
        microbatches: the number of micro-batches.
        checkpoint_stops: for each stage, the number below which micro-batches are checkpointed.
        placement: the worker of each stage.

    Raises:
        ValueError: ``schedule`` does not fit the number of micro-batches or stages.
    """
    if isinstance(schedule, Choice):
        return _named(schedule.name, schedule.split, microbatches, checkpoint_stops, placement)
    return _own(schedule, microbatches, checkpoint_stops, placement)


@lru_cache(maxsize=16)
def _own(schedule: Schedule, microbatches: int, stops: tuple[int, ...], placement: tuple[int, ...]) -> Walk:
    validate(schedule, microbatches, placement)
    return schedule.recomputing(stops).on(placement)


@lru_cache(maxsize=64)
def forwards_and_backwards(
    microbatches: int, checkpoint_stops: tuple[int, ...], placement: tuple[int, ...]
) -> tuple[Walk, Walk]:
    """The steps of each worker for a forward, and those for a backward."""
    forwards, backwards = halves(fill_drain(microbatches, len(placement), checkpoint_stops))
    return forwards.on(placement), backwards.on(placement)


@lru_cache(maxsize=64)
def _named(
    name: str, split: tuple[int, ...], microbatches: int, stops: tuple[int, ...], placement: tuple[int, ...]
) -> Walk:
    if name in _WITHOUT_LOOPS and 1 < len(placement) == len(set(placement)):
        _log.warning(  # once for each number of stages and micro-batches, since the result is cached
            "schedule=%r has nothing to interleave, because each of the %d partitions has a worker of its own, and so "
            "it is %s; give each worker several partitions, as with devices=[0, 1, 0, 1], or on the CPU "
            "devices=['cpu:0', 'cpu:1'] * 2",
            name,
            len(placement),
            _WITHOUT_LOOPS[name],
        )
    return named(name, microbatches, placement, stops, split).on(placement)
