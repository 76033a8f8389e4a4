"""The step lists of all workers, cached per schedule and run size."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..schedule import Choice, Schedule, Walk, fill_drain, halves, named, validate


class Size(NamedTuple):
    """The properties of a run, besides its schedule, that determine the order of its steps.

    Attributes:
        placement: the worker of each stage.
        checkpoint_stops: per stage, the index below which micro-batches are checkpointed.
    """

    microbatches: int
    placement: tuple[int, ...]
    checkpoint_stops: tuple[int, ...]


def walk_of(schedule: Schedule | Choice, size: Size, *, has_loss: bool = False) -> Walk:
    """Return the steps of each worker under ``schedule``, which is custom or a choice of a named one.

    They include the loss of the full mini-batch if ``has_loss``.
    """
    if isinstance(schedule, Choice):
        return _named(schedule.name, schedule.split, size, has_loss)
    return _own(schedule, size, has_loss)


@lru_cache(maxsize=64)
def waits(schedule: Schedule | str, size: Size) -> bool:
    """Return whether the last stage begins no backward before its last forward under ``schedule``."""
    try:
        whole = named(schedule, *size) if isinstance(schedule, str) else schedule
        whole.with_loss()
    except ValueError:
        return False
    return True


@lru_cache(maxsize=16)
def _own(schedule: Schedule, size: Size, has_loss: bool) -> Walk:
    validate(schedule, size.microbatches, size.placement)
    whole = schedule.with_loss() if has_loss else schedule
    return whole.recomputing(size.checkpoint_stops).on(size.placement)


@lru_cache(maxsize=64)
def _named(name: str, split: tuple[int, ...], size: Size, has_loss: bool) -> Walk:
    whole = named(name, *size, split)
    return (whole.with_loss() if has_loss else whole).on(size.placement)


@lru_cache(maxsize=64)
def forwards(size: Size, *, has_loss: bool = False) -> Walk:
    """Return all forwards, followed by the loss of the full mini-batch if ``has_loss``."""
    alone = halves(fill_drain(*_numbers(size)))[0]
    return (alone.with_loss() if has_loss else alone).on(size.placement)


@lru_cache(maxsize=64)
def backwards(size: Size) -> Walk:
    return halves(fill_drain(*_numbers(size)))[1].on(size.placement)


def _numbers(size: Size) -> tuple[int, int, tuple[int, ...]]:
    return size.microbatches, len(size.placement), size.checkpoint_stops
