"""What one worker does, without making what the others do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ._actions import Action, Step
from ._builders import expect_even, interleaved_steps
from ._modes import Stops, stop_of_each
from ._named import ORDERS, SCHEDULES, expect_name, expect_turns, named


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

    Where each stage has a worker of its own, and under ``"interleaved"``, only the worker's own steps are made, however
    many stages there are: each of many processes can make its own program. Elsewhere the whole schedule is made.

    Args:
        name: of the schedule, in capitals or not.
        microbatches: m, how many there are.
        stages: n, how many there are.
        worker: whose steps.
        placement: the worker of each stage; by default each stage has its own.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: under ``"zero_bubble"``, the stages whose backward runs in two parts; all by default.

    Returns:
        The steps, in order.

    Raises:
        ValueError: there is no schedule ``name``, or no such worker; ``placement`` or ``checkpoint_stop`` has another
            length; or the schedule is not for this placement.

    >>> print(*program_of("1f1b", 4, stages=1000, worker=998))
    F0@998 F1@998 B0@998 F2@998 B1@998 F3@998 B2@998 B3@998
    """
    expect_name(name, SCHEDULES)
    _expect_worker(worker, stages, placement)
    own = _own(name.lower(), microbatches, stages, worker, placement, checkpoint_stop, split)
    if own is not None:
        return tuple(own)
    place = range(stages) if placement is None else placement
    return tuple(named(name, microbatches, place, checkpoint_stop, split).on(place)[worker])


def _own(
    name: str,
    microbatches: int,
    stages: int,
    worker: int,
    placement: Sequence[int] | None,
    checkpoint_stop: Stops,
    split: Collection[int] | None,
) -> Iterator[Step] | None:
    """The worker's steps one by one; None if they depend on those of others."""
    if name == "interleaved":
        workers = stages if placement is None else expect_turns(placement)
        expect_even(stages, workers)
        return interleaved_steps(microbatches, workers, worker, stop_of_each(checkpoint_stop, stages))
    if name in ORDERS and (placement is None or list(placement) == list(range(stages))):
        order = ORDERS[name](microbatches, stages, checkpoint_stop, split)(worker)
        return (Step(worker, Action._make(action)) for action in order)
    return None


def _expect_worker(worker: int, stages: int, placement: Sequence[int] | None) -> None:
    if placement is not None and len(placement) != stages:
        raise ValueError(f"placement: expected a worker for each of {stages} stages, got {len(placement)}")
    if worker not in (range(stages) if placement is None else placement):
        which = f"from 0 to {stages - 1}" if placement is None else f"of the placement {list(placement)}"
        raise ValueError(f"worker: expected one {which}, got {worker}")
