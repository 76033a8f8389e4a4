"""The steps of each worker: computed once for each size, checkpointing, schedule and placement."""

from __future__ import annotations

import logging
from functools import lru_cache

from ..schedule import SPLITTING, Action, Choice, Kind, Schedule, Step, Walk, fill_drain, halves, named, validate
from ..schedule._named import lanes

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
    schedule: Schedule | Choice,
    microbatches: int,
    checkpoint_stops: tuple[int, ...],
    placement: tuple[int, ...],
    worker: int | None = None,
) -> Walk:
    """The steps of each worker under ``schedule``.

    Args:
        schedule: a schedule of the caller's own, or the choice of a named one.
        microbatches: the number of micro-batches.
        checkpoint_stops: for each stage, the number below which micro-batches are checkpointed.
        placement: the worker of each stage.
        worker: the one whose steps are needed, so that those of thousands of others need not be computed; None for all.

    Raises:
        ValueError: ``schedule`` does not fit the number of micro-batches or stages.
    """
    if isinstance(schedule, Choice):
        if worker is not None:
            return _alone(schedule.name, schedule.split, microbatches, checkpoint_stops, placement, worker)
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


def forwards_of(
    microbatches: int, checkpoint_stops: tuple[int, ...], placement: tuple[int, ...], worker: int | None = None
) -> Walk:
    """The steps of each worker for a forward; ``worker`` as for :func:`walk_of`."""
    if worker is None:
        return forwards_and_backwards(microbatches, checkpoint_stops, placement)[0]
    steps = _alone("fill_drain", (), microbatches, checkpoint_stops, placement, worker)[worker]
    return (*[()] * worker, tuple(step for step in steps if step.action.kind == Kind.FORWARD))


@lru_cache(maxsize=64)
def _alone(
    name: str,
    split: tuple[int, ...],
    microbatches: int,
    stops: tuple[int, ...],
    placement: tuple[int, ...],
    worker: int,
) -> Walk:
    """A walk in which only ``worker`` has steps."""
    splits = split if name in SPLITTING else None
    lane = lanes(name, microbatches, placement, stops, splits)[worker]
    return (*[()] * worker, tuple(Step(j, Action(*action)) for j, action in lane))


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
