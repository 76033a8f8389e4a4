"""What a schedule would take, from what its stages take: nothing is run.

>>> from gpipe.schedule import fill_drain
>>> timeline = simulate(fill_drain(8, 4), [StageCost(forward=1, backward=2)] * 4)
>>> timeline.makespan, round(timeline.bubble, 3)
(33.0, 0.273)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from profiler import LayerProfile, Profile

from ..schedule import Kind, Program, Schedule, Step, checkpoint_stops, named, replay
from ..schedule._makespan import Lane
from ..schedule._makespan import makespan as replayed
from ..schedule._named import lanes
from ._events import SECONDS, TICKS, Event
from ._hops import Transfer, hop_seconds
from ._timeline import Timeline

__all__ = ["StageCost", "makespan", "simulate", "stage_costs"]


@dataclass(frozen=True)
class StageCost:
    """What a stage takes for one micro-batch.

    Attributes:
        forward, backward, recompute: seconds; a recomputation takes those of the forward, unless told otherwise.
        backward_input, backward_weight: the seconds of the two parts of a split backward; what is not told of them is
            the rest of the backward, or half of it each.
        activation_bytes: what the stage keeps for the backward.
        boundary_bytes: of the stage's input. They cross the link before it, forwards as a value and backwards as a
            gradient, and are all that a checkpointed micro-batch keeps until its recomputation.
        layers: their names, as text for people.
        timed: whether times are seconds. Where nothing was measured they are ticks, and only bytes are known.

    >>> StageCost(forward=1, backward=3, backward_input=1).seconds("backward_weight")
    2
    """

    forward: float
    backward: float
    recompute: float | None = None
    backward_input: float | None = None
    backward_weight: float | None = None
    activation_bytes: int = 0
    boundary_bytes: int = 0
    layers: str = ""
    timed: bool = True

    def __post_init__(self) -> None:
        for field in fields(self)[:-2]:
            value = getattr(self, field.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}: expected a number that is not negative, got {value!r}")
        for part in (self.backward_input, self.backward_weight):
            if None in (self.backward_input, self.backward_weight) and part is not None and part > self.backward:
                raise ValueError(
                    f"backward: {self.backward!r} seconds are less than the {part!r} of one of its parts; give both"
                )

    def seconds(self, kind: Kind) -> float:
        """How long an action of this kind takes."""
        if kind == Kind.RECOMPUTE:
            return self.forward if self.recompute is None else self.recompute
        if kind == Kind.BACKWARD_INPUT:
            return self._part(self.backward_input, self.backward_weight)
        if kind == Kind.BACKWARD_WEIGHT:
            return self._part(self.backward_weight, self.backward_input)
        return self.forward if kind == Kind.FORWARD else self.backward

    def _part(self, own: float | None, other: float | None) -> float:
        if own is not None:
            return own
        return self.backward / 2 if other is None else self.backward - other


def simulate(
    schedule: Sequence[Program] | str,
    costs: Sequence[StageCost],
    *,
    microbatches: int | None = None,
    checkpoint: str | Sequence[str] | None = None,
    placement: Sequence[int] | None = None,
    transfer: Transfer = 0.0,
) -> Timeline:
    """The timeline of ``schedule`` if every action takes exactly the time that ``costs`` say.

    A worker does its actions one by one in the order of the schedule, each as soon as its input is there. So no run
    with these costs and this order can be faster, and a run with any lower cost takes no longer.

    Args:
        schedule: the program of each stage, or the name of a schedule.
        costs: of each stage.
        microbatches: how many there are, for a schedule by its name.
        checkpoint: as of :class:`gpipe.GPipe`, a mode or one for each stage: micro-batches that it names and that the
            schedule does not recompute are recomputed just before their backwards. By default as ``schedule`` says.
        placement: the worker of each stage; by default the schedule's own, or else a worker for each stage.
        transfer: the seconds from worker to worker; or a function that gives them for a number of bytes, such as a
            :class:`gpipe.simulate.Link`; or a list of either, one for each link from a stage to the next. Links carry
            any number of things at once, and keep no worker from working.

    Returns:
        The timeline.

    Raises:
        ValueError: the numbers of stages differ, the workers would wait for each other for ever, or ``microbatches``
            is missing, or given for a schedule that has its own.

    >>> print(simulate("1f1b", [StageCost(1, 2)] * 2, microbatches=4, checkpoint=["always", "never"]).makespan)
    17.0
    """
    given = placement
    schedule = _schedule(schedule, len(costs), microbatches, checkpoint, placement)
    place = _placement(schedule) if given is None else list(given)
    _expect_one_each(schedule, costs=costs, placement=place)
    boundary = [_crossing(costs, place, j) for j in range(len(costs))]
    hops = hop_seconds(transfer, boundary)

    def arrives_after(source: Step, target: Step) -> float:
        return hops[max(source.stage, target.stage)]

    spans = replay(schedule.on(place), lambda step: costs[step.stage].seconds(step.action.kind), arrives_after)
    held = _held(schedule, costs)
    return Timeline(
        (
            Event(
                stage=step.stage,
                microbatch=step.action.microbatch,
                kind=step.action.kind,
                device=f"device {place[step.stage]}",
                start=span.start,
                end=span.end,
                wait=span.wait,
                bytes_moved=_moved(step, boundary),
                layers=costs[step.stage].layers,
                held_bytes=held[step],
            )
            for step, span in spans.items()
        ),
        dict(enumerate(place)),
        _unit(costs),
    )


def _unit(costs: Sequence[StageCost]) -> str:
    timed = {cost.timed for cost in costs}
    if len(timed) > 1:
        raise ValueError("costs: expected seconds for all stages or for none, got some from a profile that has none")
    return TICKS if timed == {False} else SECONDS


def makespan(
    schedule: Sequence[Program] | str,
    costs: Sequence[StageCost],
    *,
    microbatches: int | None = None,
    checkpoint: str | Sequence[str] | None = None,
    placement: Sequence[int] | None = None,
    transfer: Transfer = 0.0,
) -> float:
    """The seconds of :func:`simulate`, without a timeline: half a microsecond an action.

    A thousand stages and four thousand micro-batches take seconds; of a schedule by its name no action is kept.

    Args:
        schedule, costs, microbatches, checkpoint, placement, transfer: as of :func:`simulate`. Every stage does the
            forward of all micro-batches, and the backward of all or none.

    Returns:
        When the last action ends.

    Raises:
        ValueError: as :func:`simulate`.

    >>> makespan("1f1b", [StageCost(1, 2)] * 4, microbatches=8)
    33.0
    """
    if isinstance(schedule, str) and microbatches is not None:
        place = list(range(len(costs))) if placement is None else list(placement)
        _expect_one_each(costs, placement=place)
        stops = checkpoint_stops(checkpoint or "never", microbatches, len(costs))
        steps: Sequence[Lane] = lanes(schedule, microbatches, place, stops)
    else:
        whole = _schedule(schedule, len(costs), microbatches, checkpoint, placement)
        place = _placement(whole) if placement is None else list(placement)
        _expect_one_each(whole, costs=costs, placement=place)
        steps, microbatches = [_with_kinds(lane) for lane in whole.on(place)], _microbatches(whole)
    hops = hop_seconds(transfer, [_crossing(costs, place, j) for j in range(len(costs))])
    return replayed(steps, microbatches, [{kind: cost.seconds(kind) for kind in Kind} for cost in costs], hops)


def _with_kinds(lane: Sequence[Step]) -> Lane:
    """The steps with members in the place of the names of kinds, which will do in a schedule."""
    return ((stage, (Kind(kind), i)) for stage, (kind, i) in lane)


def _schedule(
    schedule: Sequence[Program] | str,
    stages: int,
    microbatches: int | None,
    checkpoint: str | Sequence[str] | None,
    placement: Sequence[int] | None,
) -> Schedule:
    if isinstance(schedule, str):
        if microbatches is None:
            raise ValueError(f"microbatches: expected a number for the schedule {schedule!r}, got None")
        if placement is not None:
            _expect_one_each([()] * stages, placement=placement)
        schedule = named(schedule, microbatches, range(stages) if placement is None else placement)
    elif microbatches is not None:
        raise ValueError("microbatches: goes with the name of a schedule; programs have their own number")
    schedule = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
    if checkpoint is None:
        return schedule
    return schedule.recomputing(checkpoint_stops(checkpoint, _microbatches(schedule), len(schedule)))


def _microbatches(schedule: Schedule) -> int:
    return 1 + max((action.microbatch for program in schedule for action in program), default=-1)


def _placement(schedule: Schedule) -> list[int]:
    own = {step.stage: worker for worker, steps in enumerate(schedule.walk or ()) for step in steps}
    return [own.get(j, j) for j in range(len(schedule))]


def _expect_one_each(schedule: Sequence[object], **arguments: Sequence[object]) -> None:
    for name, given in arguments.items():
        if len(given) != len(schedule):
            raise ValueError(
                f"{name}: expected one for each of the schedule's {len(schedule)} stages, got {len(given)}"
            )


def _crossing(costs: Sequence[StageCost], placement: Sequence[int], j: int) -> int | None:
    """The bytes that stage j gets from another worker; None if the stage before is on its own."""
    apart = j > 0 and placement[j - 1] != placement[j]
    return costs[j].boundary_bytes if apart else None


def _moved(step: Step, boundary: Sequence[int | None]) -> int:
    if step.action.kind == Kind.FORWARD:
        return boundary[step.stage] or 0
    if step.action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and step.stage + 1 < len(boundary):
        return boundary[step.stage + 1] or 0
    return 0


def _held(schedule: Schedule, costs: Sequence[StageCost]) -> dict[Step, int]:
    """What each stage keeps after each of its steps."""
    held: dict[Step, int] = {}
    for j, (program, cost) in enumerate(zip(schedule, costs, strict=True)):
        changes = _changes(program, cost)
        held.update(zip((Step(j, action) for action in program), accumulate(changes), strict=True))
    return held


def _changes(program: Program, cost: StageCost) -> Iterable[int]:
    checkpointed = {i for kind, i in program if kind == Kind.RECOMPUTE}
    for kind, i in program:
        if kind == Kind.FORWARD:
            yield cost.boundary_bytes if i in checkpointed else cost.activation_bytes
        elif kind == Kind.RECOMPUTE:
            yield cost.activation_bytes - cost.boundary_bytes
        else:
            yield 0 if kind == Kind.BACKWARD_INPUT else -cost.activation_bytes


def stage_costs(
    profile: Profile, balance: Sequence[int], chunks: int | None = None, *, input_bytes: int = 0
) -> list[StageCost]:
    """The cost of each stage, from a profile of the layers.

    Args:
        profile: of the model, on a micro-batch.
        balance: how many layers each stage has.
        chunks: into how many micro-batches the mini-batch will be cut. If this is not what was profiled, seconds and
            bytes are taken to be in proportion.
        input_bytes: of a micro-batch's input, which the first stage keeps if it is checkpointed.

    A profile without seconds, as of a model on ``meta``, tells bytes alone: each stage then takes one tick for a
    forward and two for a backward, and timelines say ticks. The most that a stage keeps depends on the order alone.

    On CUDA a stage gets a copy of its input, which it keeps too; on a CPU this is the output that the stage before
    keeps anyhow.

    Raises ValueError if the balance does not fit.
    """
    if sum(balance) != len(profile) or min(balance, default=1) < 1:
        raise ValueError(
            f"balance: expected positive numbers that sum up to {len(profile)} layers, got {list(balance)}"
        )
    if chunks is not None and chunks < 1:
        raise ValueError(f"chunks: expected a positive number of micro-batches, got {chunks}")
    scale = 1.0 if chunks is None else profile.chunks / chunks
    ends = list(accumulate(balance))
    stages = [profile.layers[end - size : end] for end, size in zip(ends, balance, strict=True)]
    inputs = [input_bytes, *(round(layers[-1].output_bytes * scale) for layers in stages[:-1])]
    copied = profile.device.startswith("cuda")
    return [
        _stage_cost(layers, scale, boundary, boundary if copied and j else 0)
        for j, (layers, boundary) in enumerate(zip(stages, inputs, strict=True))
    ]


def _stage_cost(layers: Sequence[LayerProfile], scale: float, boundary: int, copied: int) -> StageCost:
    timed = all(layer.seconds is not None for layer in layers)
    return StageCost(
        forward=scale * sum(layer.forward_seconds or 0.0 for layer in layers) if timed else 1.0,
        backward=scale * sum(layer.backward_seconds or 0.0 for layer in layers) if timed else 2.0,
        activation_bytes=round(scale * sum(layer.saved_bytes for layer in layers)) + copied,
        boundary_bytes=boundary,
        layers=", ".join(layer.name for layer in layers),
        timed=timed,
    )
