"""The steps of each worker: computed once for each size, checkpointing, schedule and placement."""

from __future__ import annotations

from functools import lru_cache

from ..schedule import SPLITTING, Action, Choice, Kind, Schedule, Step, Walk, fill_drain, halves, named, validate
from ..schedule._named import lanes


def walk_of(
    schedule: Schedule | Choice,
    microbatches: int,
    checkpoint_stops: tuple[int, ...],
    placement: tuple[int, ...],
    worker: int | None = None,
) -> Walk:
    """The steps of each worker under ``schedule``: the caller's own, or the choice of a named one.

    Args:
        checkpoint_stops: for each stage, the number below which micro-batches are checkpointed.
        placement: the worker of each stage.
        worker: the one whose steps are needed, so that those of thousands of others need not be computed; None for all.
    """
    if isinstance(schedule, Choice):
        return _named(schedule.name, schedule.split, microbatches, checkpoint_stops, placement, worker)
    return _own(schedule, microbatches, checkpoint_stops, placement)


@lru_cache(maxsize=16)
def _own(schedule: Schedule, microbatches: int, stops: tuple[int, ...], placement: tuple[int, ...]) -> Walk:
    validate(schedule, microbatches, placement)
    return schedule.recomputing(stops).on(placement)


@lru_cache(maxsize=64)
def _named(
    name: str,
    split: tuple[int, ...],
    microbatches: int,
    stops: tuple[int, ...],
    placement: tuple[int, ...],
    worker: int | None,
) -> Walk:
    if worker is None:
        return named(name, microbatches, placement, stops, split).on(placement)
    lane = lanes(name, microbatches, placement, stops, split if name in SPLITTING else None)[worker]
    return (*[()] * worker, tuple(Step(j, Action(*action)) for j, action in lane))


@lru_cache(maxsize=64)
def forwards_and_backwards(
    microbatches: int, checkpoint_stops: tuple[int, ...], placement: tuple[int, ...]
) -> tuple[Walk, Walk]:
    forwards, backwards = halves(fill_drain(microbatches, len(placement), checkpoint_stops))
    return forwards.on(placement), backwards.on(placement)


def forwards_of(
    microbatches: int, checkpoint_stops: tuple[int, ...], placement: tuple[int, ...], worker: int | None = None
) -> Walk:
    if worker is None:
        return forwards_and_backwards(microbatches, checkpoint_stops, placement)[0]
    steps = _named("fill_drain", (), microbatches, checkpoint_stops, placement, worker)[worker]
    return (*[()] * worker, tuple(step for step in steps if step.action.kind == Kind.FORWARD))
