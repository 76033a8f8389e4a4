"""The steps of each worker: computed once for each schedule and size of a run."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..schedule import Choice, Schedule, Walk, fill_drain, halves, named, validate


class Size(NamedTuple):
    """What the order of the steps of a run depends on, besides its schedule.

    Attributes:
        placement: the worker of each stage.
        checkpoint_stops: for each stage, the number below which micro-batches are checkpointed.
    """

    microbatches: int
    placement: tuple[int, ...]
    checkpoint_stops: tuple[int, ...]


def walk_of(schedule: Schedule | Choice, size: Size) -> Walk:
    """The steps of each worker under ``schedule``: the caller's own, or the choice of a named one."""
    if isinstance(schedule, Choice):
        return _named(schedule.name, schedule.split, size)
    return _own(schedule, size)


@lru_cache(maxsize=16)
def _own(schedule: Schedule, size: Size) -> Walk:
    validate(schedule, size.microbatches, size.placement)
    return schedule.recomputing(size.checkpoint_stops).on(size.placement)


@lru_cache(maxsize=64)
def _named(name: str, split: tuple[int, ...], size: Size) -> Walk:
    return named(name, *size, split).on(size.placement)


@lru_cache(maxsize=64)
def forwards_and_backwards(size: Size) -> tuple[Walk, Walk]:
    forwards, backwards = halves(fill_drain(size.microbatches, len(size.placement), size.checkpoint_stops))
    return forwards.on(size.placement), backwards.on(size.placement)
