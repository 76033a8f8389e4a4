"""The steps of each worker: computed once for each schedule and size of a run."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..schedule import SPLITTING, Action, Choice, Kind, Schedule, Step, Walk, fill_drain, halves, named, validate
from ..schedule._named import lanes


class Size(NamedTuple):
    """What the order of the steps of a run depends on, besides its schedule.

    Attributes:
        placement: the worker of each stage.
        checkpoint_stops: for each stage, the number below which micro-batches are checkpointed.
    """

    microbatches: int
    placement: tuple[int, ...]
    checkpoint_stops: tuple[int, ...]


def walk_of(schedule: Schedule | Choice, size: Size, worker: int | None = None) -> Walk:
    """The steps of each worker under ``schedule``: the caller's own, or the choice of a named one.

    Args:
        worker: the one whose steps are needed, so that those of thousands of others need not be computed; None for all.
    """
    if isinstance(schedule, Choice):
        return _named(schedule.name, schedule.split, size, worker)
    return _own(schedule, size)


@lru_cache(maxsize=16)
def _own(schedule: Schedule, size: Size) -> Walk:
    validate(schedule, size.microbatches, size.placement)
    return schedule.recomputing(size.checkpoint_stops).on(size.placement)


@lru_cache(maxsize=64)
def _named(name: str, split: tuple[int, ...], size: Size, worker: int | None) -> Walk:
    if worker is None:
        return named(name, *size, split).on(size.placement)
    lane = lanes(name, *size, split if name in SPLITTING else None)[worker]
    return (*[()] * worker, tuple(Step(j, Action(*action)) for j, action in lane))


@lru_cache(maxsize=64)
def forwards_and_backwards(size: Size) -> tuple[Walk, Walk]:
    forwards, backwards = halves(fill_drain(size.microbatches, len(size.placement), size.checkpoint_stops))
    return forwards.on(size.placement), backwards.on(size.placement)


def forwards_of(size: Size, worker: int | None = None) -> Walk:
    if worker is None:
        return forwards_and_backwards(size)[0]
    steps = _named("fill_drain", (), size, worker)[worker]
    return (*[()] * worker, tuple(step for step in steps if step.action.kind == Kind.FORWARD))
