"""The description of a run, complete before the run begins."""

from __future__ import annotations

from typing import NamedTuple

from streams import Context

from ..schedule import Choice, Kind, Schedule, WorkerSteps
from ._losses import Losses
from ._settings import Observer
from ._updates import Updates
from ._worker_steps import Size, backwards, forwards, worker_steps


class RunSpec(NamedTuple):
    """A run as plain data.

    Attributes:
        size: the number of micro-batches, the worker of each stage, and which micro-batches are checkpointed.
        inline: whether the calling thread takes the steps of all stages of this process.
        worker_steps: the steps of each worker.
        later: the steps of a backward that the caller begins; empty if there is none or if it is part of
            ``worker_steps``.
        trains: whether the run has backwards; if not, no cell is kept.
        loss: computes the loss and combines micro-batch losses; None if the run ends with the outputs.
        context: the settings of the calling thread, for workers and recomputations.
        seed: the seed of random numbers, if processes have agreed on it; else None until a layer uses random numbers.
        observer: receives the events of the run.
        splits: the stages whose backward is split.
        updates: updates parameters on the host during the backwards.
        cells_offloaded: the stage and micro-batch of each cell that sends what it saves to the host.
        replays: whether a model recomputes its output on the full batch, from the outputs of its blocks.

    A spec with a loss is for one run: the loss collects what that run computes.
    """

    size: Size
    inline: bool
    worker_steps: WorkerSteps
    later: WorkerSteps
    trains: bool
    loss: Losses | None
    context: Context
    seed: int | None = None
    observer: Observer | None = None
    splits: frozenset[int] = frozenset()
    replays: bool = False
    updates: Updates | None = None
    cells_offloaded: frozenset[tuple[int, int]] = frozenset()


def split_in(worker_steps: WorkerSteps) -> frozenset[int]:
    """The stages whose backward is split."""
    return frozenset(stage for steps in worker_steps for stage, action in steps if action.kind == Kind.BACKWARD_INPUT)


def steps_of_run(
    size: Size, schedule: Schedule | Choice | None, *, has_loss: bool, goes_back: bool
) -> tuple[WorkerSteps, WorkerSteps]:
    """Return the steps of a run, and the steps of a backward that the caller begins.

    Args:
        schedule: the schedule of a training step; None if the run itself has no backwards.
        has_loss: whether the steps include the loss of the full mini-batch.
        goes_back: whether the caller may begin a backward.

    Raises:
        ValueError: the schedule does not fit ``size``.
    """
    if schedule is not None:
        return worker_steps(schedule, size, has_loss=has_loss), ()
    return forwards(size, has_loss=has_loss), backwards(size) if goes_back else ()
