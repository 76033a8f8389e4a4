"""The steps of one worker, computed without those of the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ._actions import Action, Step
from ._modes import Stops
from ._named import SCHEDULES, expect_name, lanes, usual_placement


def program_of(
    name: str,
    microbatches: int,
    stages: int,
    worker: int,
    *,
    placement: Sequence[int] | None = None,
    checkpoint_stop: Stops = 0,
    split: Collection[int] | None = None,
) -> tuple[Step, ...]:
    """The steps of one worker under the schedule called ``name``: those of ``named(...).on(placement)[worker]``.

    If each stage has a worker of its own, or the schedule has its usual loops or V, only the steps of this worker are
    computed, for any number of stages: so each of many processes can make its own program. Otherwise the whole schedule
    is computed.

    Args:
        name: the name of the schedule, in capitals or not.
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages.
        worker: the number of the worker.
        placement: the worker of each stage; by default one for each, or the V that the schedule needs.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: for schedules in :data:`gpipe.schedule.SPLITTING`, the stages whose backward is split; by default all.

    Returns:
        The steps, in order.

    Raises:
        ValueError: there is no schedule ``name``, or no such worker; ``placement`` or ``checkpoint_stop`` has another
            length; or the schedule is not for this placement.

    >>> print(*program_of("1f1b", 4, stages=1000, worker=998))
    F0@998 F1@998 B0@998 F2@998 B1@998 F3@998 B2@998 B3@998
    """
    expect_name(name, SCHEDULES)
    place = usual_placement(name, stages) if placement is None else placement
    _expect_worker(worker, stages, place)
    lane = lanes(name, microbatches, place, checkpoint_stop, split)[worker]
    return tuple(Step(j, Action._make(action)) for j, action in lane)


def _expect_worker(worker: int, stages: int, placement: Sequence[int]) -> None:
    if len(placement) != stages:
        raise ValueError(f"placement: expected a worker for each of {stages} stages, got {len(placement)}")
    if worker not in placement:
        raise ValueError(f"worker: expected one of the placement, from 0 to {max(placement, default=-1)}, got {worker}")
