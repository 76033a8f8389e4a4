"""The step lists of all workers, cached per schedule and run size."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..schedule import Choice, Schedule, WorkerSteps, fill_drain, named, split_forward_backward, validate
from ..schedule._loads import expect_loaded, with_loads
from ..schedule._named import BREADTH_FIRST
from ..schedule._offloads import expect_prefetched, with_offloads


class Size(NamedTuple):
    """The properties of a run, besides its schedule, that determine the order of its steps.

    Attributes:
        placement: the worker of each stage.
        checkpoint_stops: per stage, the index below which micro-batches are checkpointed.
        offloaded: the stages whose parameters are on the host.
        offloading: the stages whose cells send their saved tensors to the host.
    """

    microbatches: int
    placement: tuple[int, ...]
    checkpoint_stops: tuple[int, ...]
    offloaded: tuple[int, ...] = ()
    offloading: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The number of micro-batches, the placement and the stops, which determine schedules."""
        return self.microbatches, self.placement, self.checkpoint_stops


def worker_steps(schedule: Schedule | Choice, size: Size, *, has_loss: bool = False) -> WorkerSteps:
    """Return the steps of each worker under ``schedule``, which is custom or a choice of a named one.

    They include the loss of the full mini-batch if ``has_loss``.
    """
    if isinstance(schedule, Choice):
        return _build_named(schedule.name, schedule.split, size, has_loss)
    return _own(schedule, size, has_loss)


@lru_cache(maxsize=64)
def waits(schedule: Schedule | str, size: Size) -> bool:
    """Return whether the last stage begins no backward before its last forward under ``schedule``."""
    try:
        whole = named(schedule, *size.order) if isinstance(schedule, str) else schedule
        whole.with_loss()
    except ValueError:
        return False
    return True


@lru_cache(maxsize=16)
def _own(schedule: Schedule, size: Size, has_loss: bool) -> WorkerSteps:
    validate(schedule, size.microbatches, size.placement)
    whole = schedule.with_loss() if has_loss else schedule
    worker_steps = _moving(whole.recomputing(size.checkpoint_stops).on(size.placement), size)
    expect_loaded(worker_steps, size.offloaded)
    expect_prefetched(worker_steps, size.offloading)
    return worker_steps


@lru_cache(maxsize=64)
def _build_named(name: str, split: tuple[int, ...], size: Size, has_loss: bool) -> WorkerSteps:
    whole = named(name, *size.order, split)
    return _moving((whole.with_loss() if has_loss else whole).on(size.placement), size)


@lru_cache(maxsize=64)
def forwards(size: Size, *, has_loss: bool = False) -> WorkerSteps:
    """Return all forwards, followed by the loss of the full mini-batch if ``has_loss``."""
    alone = split_forward_backward(_fill_drain(size))[0]
    return _moving((alone.with_loss() if has_loss else alone).on(size.placement), size)


@lru_cache(maxsize=64)
def backwards(size: Size) -> WorkerSteps:
    return _moving(split_forward_backward(_fill_drain(size))[1].on(size.placement), size)


def _fill_drain(size: Size) -> Schedule:
    """Return all forwards, then all backwards; breadth first if stages are loaded, so that each is loaded twice."""
    if size.offloaded:
        return named(BREADTH_FIRST, *size.order)
    return fill_drain(size.microbatches, len(size.placement), size.checkpoint_stops)


def _moving(worker_steps: WorkerSteps, size: Size) -> WorkerSteps:
    """Add the transfers from and to the host."""
    worker_steps = with_loads(worker_steps, size.offloaded) if size.offloaded else worker_steps
    return with_offloads(worker_steps, size.offloading) if size.offloading else worker_steps
