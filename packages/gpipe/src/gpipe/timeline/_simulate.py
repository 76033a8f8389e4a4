"""Predict the timeline of a schedule from the costs of its stages. Nothing is run.

>>> from gpipe.schedule import fill_drain
>>> timeline = simulate(fill_drain(8, 4), [StageCost(forward=1, backward=2)] * 4)
>>> timeline.makespan, round(timeline.bubble, 3)
(33.0, 0.273)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from ..schedule import Kind, Program, Schedule, Step, WorkerSteps, checkpoint_stops, named, replay
from ..schedule._modes import offloading_stages
from ..schedule._named import lanes as named_lanes
from ..schedule._named import usual_placement
from ..schedule._replay import Lane, steps_of_lanes
from ..schedule._replay import makespan as replayed
from ._costs import StageCost
from ._events import Event
from ._hops import Transfer, hop_seconds
from ._timeline import Timeline


def simulate(
    schedule: Sequence[Program] | str,
    costs: Sequence[StageCost],
    *,
    microbatches: int | None = None,
    checkpoint: str | Sequence[str] | None = None,
    placement: Sequence[int] | None = None,
    transfer: Transfer = 0.0,
) -> Timeline:
    """Predict the timeline of ``schedule`` if every action takes exactly its cost.

    A worker runs its actions in the order of the schedule, each as soon as its input has arrived.

    Args:
        schedule: the program of each stage, or the name of a schedule.
        costs: the cost of each stage.
        microbatches: the number of micro-batches, required with the name of a schedule.
        checkpoint: a mode, or one per stage. Checkpointed micro-batches are recomputed just before their backwards,
            unless the schedule contains the recomputation; with ``"offload"``, their saved tensors move to the host
            and back. By default only recomputations and transfers in ``schedule`` run.
        placement: the worker of each stage. By default the schedule's placement if it has one, as V-shaped schedules
            do, else one worker per stage.
        transfer: the seconds of a transfer between workers, or a function from bytes to seconds such as a
            :class:`gpipe.simulate.Link`, or a list with one of either per link from a stage to the next. Workers
            compute during transfers, and concurrent transfers do not slow each other down.

    Returns:
        The timeline.

    Raises:
        TypeError: ``transfer`` is neither a number nor a function that returns one.
        ValueError: an argument is invalid or has the wrong length, the workers wait for each other forever, or
            ``microbatches`` is missing with the name of a schedule, or given with programs.

    >>> print(simulate("1f1b", [StageCost(1, 2)] * 2, microbatches=4, checkpoint=["always", "never"]).makespan)
    17.0
    """
    lanes, place, _ = _lanes(schedule, costs, microbatches, checkpoint, placement)
    worker_steps = steps_of_lanes(lanes)
    crossing, held = crossing_bytes(costs, place), _compute_held_bytes(worker_steps, costs)
    seconds = [{kind: cost.seconds(kind) for kind in Kind} for cost in costs]
    events = list[Event]()
    for step, span in replay(worker_steps, seconds, hop_seconds(transfer, crossing)).items():
        j, (kind, i) = step
        # A forward receives the previous stage's output, a backward the gradient from the next stage.
        into = {Kind.FORWARD: j, Kind.BACKWARD: j + 1, Kind.BACKWARD_INPUT: j + 1}.get(kind, len(costs))
        moved = [*crossing, None][into] or 0  # nothing crosses after the last stage
        events.append(Event(j, i, kind, f"device {place[j]}", *span, moved, costs[j].layers, held[step]))
    return Timeline(events, dict(enumerate(place)))


def makespan(
    schedule: Sequence[Program] | str,
    costs: Sequence[StageCost],
    *,
    microbatches: int | None = None,
    checkpoint: str | Sequence[str] | None = None,
    placement: Sequence[int] | None = None,
    transfer: Transfer = 0.0,
) -> float:
    """Compute the makespan of :func:`simulate` without its timeline, in about a microsecond per action.

    Args:
        schedule, costs, microbatches, checkpoint, placement, transfer: as for :func:`simulate`. Every stage must run
            the forward of all micro-batches, and the backward of all or none.

    Returns:
        The end of the last action, in seconds.

    Raises:
        TypeError, ValueError: as for :func:`simulate`.

    >>> makespan("1f1b", [StageCost(1, 2)] * 4, microbatches=8)
    33.0
    """
    lanes, place, count = _lanes(schedule, costs, microbatches, checkpoint, placement)
    seconds = [{kind: cost.seconds(kind) for kind in Kind} for cost in costs]
    return replayed(lanes, count, seconds, hop_seconds(transfer, crossing_bytes(costs, place)))


def _lanes(
    schedule: Sequence[Program] | str,
    costs: Sequence[StageCost],
    microbatches: int | None,
    checkpoint: str | Sequence[str] | None,
    placement: Sequence[int] | None,
) -> tuple[Sequence[Lane], list[int], int]:
    if isinstance(schedule, str):
        if microbatches is None:
            raise ValueError(f"microbatches: expected a number for the schedule {schedule!r}, got None")
        place = usual_placement(schedule, len(costs)) if placement is None else list(placement)
        expect_one_each(len(costs), placement=place)
        modes = checkpoint or "never"
        stops = checkpoint_stops(modes, microbatches, len(costs))
        if stages := offloading_stages(modes, len(costs)):
            whole = named(schedule, microbatches, place, stops).offloading(place, stages)
            return whole.on(place), place, microbatches
        return named_lanes(schedule, microbatches, place, stops), place, microbatches
    if microbatches is not None:
        raise ValueError("microbatches: expected None, because schedule is not a name and has its own number")
    whole = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
    # A list of worker steps determines the worker of each stage; without it every stage gets its own.
    own = {step.stage: worker for worker, steps in enumerate(whole.worker_steps or ()) for step in steps}
    place = [own.get(j, j) for j in range(len(whole))] if placement is None else list(placement)
    expect_one_each(len(whole), costs=costs, placement=place)
    count = 1 + max((action.microbatch for program in whole for action in program), default=-1)
    if checkpoint is not None:
        whole = whole.recomputing(checkpoint_stops(checkpoint, count, len(whole)))
        if stages := offloading_stages(checkpoint, len(whole)):
            whole = whole.offloading(place, stages)
    return whole.on(place), place, count


def expect_one_each(stages: int, **arguments: Sequence[object]) -> None:
    for name, given in arguments.items():
        if len(given) != stages:
            raise ValueError(f"{name}: expected one per stage of the schedule ({stages}), got {len(given)}")


def crossing_bytes(costs: Sequence[StageCost], placement: Sequence[int]) -> list[int | None]:
    # Stages on the same worker pass tensors without a copy.
    apart = [False, *(before != own for before, own in pairwise(placement))]
    return [cost.boundary_bytes if far else None for cost, far in zip(costs, apart, strict=False)]


def _compute_held_bytes(worker_steps: WorkerSteps, costs: Sequence[StageCost]) -> dict[Step, int]:
    recomputed = {(j, i) for j, (kind, i) in chain.from_iterable(worker_steps) if kind == Kind.RECOMPUTE}
    found: dict[Step, int] = {}
    now = [0] * len(costs)
    for step in chain.from_iterable(worker_steps):
        j, (kind, i) = step
        whole, bare = costs[j].activation_bytes, costs[j].boundary_bytes
        if kind == Kind.FORWARD:
            now[j] += bare if (j, i) in recomputed else whole
        elif kind in (Kind.RECOMPUTE, Kind.PREFETCH):
            now[j] += whole - bare
        elif kind == Kind.OFFLOAD:  # its memory is free when the next one leaves, which is not counted
            now[j] -= whole - bare
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):  # weight gradients still read the saved tensors
            now[j] -= whole
        found[step] = now[j]
    return found
