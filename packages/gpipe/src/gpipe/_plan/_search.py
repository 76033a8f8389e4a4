"""Find the fastest way to train that fits: chunks, schedule, balance, and the mode of each stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from blockpartition import Infeasible, Mode, Stage, place

from ..schedule import Kind, checkpoint_stops
from ..schedule._makespan import makespan
from ..schedule._named import lanes
from ..timeline._kept import shares
from ._arguments import SCHEDULES
from ._costs import Costs, Measured
from ._memory import DeviceBytes, held_by

NEAR = 0.05
"""Of ways to train that are within this share of the fastest, the simplest is taken."""

FINALISTS = 12
"""So many are replayed; the others are slower by the closed form."""

_HOPELESS = 1.3
"""So much slower by the closed form, which knows no split backwards, a way to train does not win the replay."""

_GAP = 0.01
_REPAIRS = 8
_TICKS = 1e9  # a second, in the whole numbers that make `place` fast


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
        measured: the costs.
        chunks: numbers of micro-batches.
        schedules: names.
        modes: those that each stage may have.
        memory: what each device may hold; None is any amount.
    """

    measured: Measured
    chunks: Sequence[int]
    schedules: Sequence[str]
    modes: Sequence[tuple[str, ...]]
    memory: Sequence[int | None]

    @property
    def is_bounded(self) -> bool:
        """Whether memory can be short."""
        return any(size is not None for size in self.memory)


@dataclass(frozen=True)
class Candidate:
    """A way to train.

    Attributes:
        costs: of its micro-batches.
        schedule: its name.
        split: stages whose backward is split.
        sizes: layers of each stage.
        modes: of checkpointing, for each stage.
        bytes: what each device holds.
        seconds: of a step: by the closed form, or once it was replayed by that.
    """

    costs: Costs
    schedule: str
    split: tuple[int, ...]
    sizes: tuple[int, ...]
    modes: tuple[str, ...]
    bytes: tuple[DeviceBytes, ...]
    seconds: float

    @property
    def chunks(self) -> int:
        return self.costs.chunks

    @property
    def fullest(self) -> int:
        """The bytes of the device that holds the most."""
        return max(each.total for each in self.bytes)


def search(space: Space) -> list[Candidate]:
    """The ways to train that fit, the best first: the simplest of those near the fastest, then all by their time."""
    found = sorted(candidates(space), key=lambda each: each.seconds)
    judged = sorted((_judged(each) for each in found[:FINALISTS]), key=lambda each: each.seconds)
    if not judged:
        return []
    near = [each for each in judged if each.seconds <= judged[0].seconds * (1 + NEAR)]
    best = min(near, key=simplicity)
    return [best, *(each for each in judged if each is not best)]


def simplicity(candidate: Candidate) -> tuple[int, int, int]:
    """Less is simpler: chunks, then the schedule, then memory."""
    return candidate.chunks, SCHEDULES.index(candidate.schedule), candidate.fullest


def _judged(candidate: Candidate) -> Candidate:
    return replace(candidate, seconds=replayed(candidate))


def replayed(candidate: Candidate) -> float:
    """The seconds of a step, if every action takes what it costs."""
    costs, m = candidate.costs, candidate.chunks
    stages = costs.stage_costs(candidate.sizes, candidate.modes)
    steps = lanes(candidate.schedule, m, range(len(stages)), stops_of(candidate), candidate.split)
    seconds = [{kind: stage.seconds(kind) for kind in Kind} for stage in stages]
    pipeline = makespan(steps, m, seconds, costs.hops(candidate.sizes))
    return pipeline + costs.reduction(candidate.sizes) + costs.measured.step


def stops_of(candidate: Candidate) -> tuple[int, ...]:
    """The micro-batches that each stage checkpoints: those below."""
    return checkpoint_stops(candidate.modes, candidate.chunks, len(candidate.modes))


def candidates(space: Space) -> Iterator[Candidate]:
    """For numbers of chunks and schedules the best balance and modes that fit, with seconds by a closed form.

    Those are the time of one micro-batch through all stages, and of the others through the slowest. The quickest if
    there was any amount of memory comes first. What would be much slower even so than one that fits is left out.
    """
    fastest = math.inf
    for free in sorted(_free(space), key=lambda each: each.seconds):
        if free.seconds > fastest * _HOPELESS:
            return
        short = space.is_bounded and _excess(space, free)
        found = _fitting(space, free.costs, free.schedule) if short else free
        # Zero bubble that splits nothing is 1F1B, which is among the others unless zero bubble alone was asked for.
        if found is not None and (found.split or found.schedule != "zero_bubble" or len(space.schedules) == 1):
            fastest = min(fastest, found.seconds)
            yield found


def _free(space: Space) -> Iterator[Candidate]:
    """The best balance for each number of chunks, with any amount of memory."""
    for chunks in space.chunks:
        costs = space.measured.cut(chunks)
        placed = _placed(space, costs)
        assert placed is not None  # without limits everything fits
        for schedule in space.schedules:
            yield _candidate(space, costs, schedule, *placed)


Placed = tuple[tuple[int, ...], tuple[str, ...]]
Objective = Literal["bottleneck", "makespan"]


def _candidate(space: Space, costs: Costs, schedule: str, sizes: tuple[int, ...], modes: tuple[str, ...]) -> Candidate:
    stages = costs.stage_costs(sizes, modes)
    split = costs.split(sizes, stages) if schedule == "zero_bubble" else ()
    times = [
        stage.forward + stage.backward + (stage.seconds(Kind.RECOMPUTE) if mode != "never" else 0.0)
        for stage, mode in zip(stages, modes, strict=True)
    ]
    seconds = sum(times) + (costs.chunks - 1) * max(times) + 2 * sum(costs.hops(sizes))
    seconds += costs.reduction(sizes) + costs.measured.step
    needs = costs.device_bytes(sizes, modes, schedule, split)
    return Candidate(costs, schedule, split, sizes, modes, needs, seconds)


def _excess(space: Space, candidate: Candidate) -> dict[int, int]:
    """The bytes that devices are short of."""
    limits = enumerate(zip(candidate.bytes, space.memory, strict=True))
    return {j: need.total - room for j, (need, room) in limits if room is not None and need.total > room}


def _fitting(space: Space, costs: Costs, schedule: str) -> Candidate | None:
    """The best that fits.

    Sums over layers are exact in :func:`blockpartition.place`, but the peak of a stage is a maximum over its layers.
    So stages begin with all of their memory, and where the peak does not fit that much is taken from them.
    """
    rooms = list(space.memory)
    for _ in range(_REPAIRS):
        # The slowest stage alone is found several times as fast as the makespan.
        found = _in(space, costs, schedule, rooms, "bottleneck")
        if found is None:
            return None
        excess = _excess(space, found)
        if not excess:
            better = _in(space, costs, schedule, rooms, "makespan")
            fits = better is not None and not _excess(space, better)
            return better if fits else found
        for j, short in excess.items():
            room = rooms[j]
            assert room is not None
            rooms[j] = room - short
        if min(room for room in rooms if room is not None) < 0:
            return None
    return None


def _in(
    space: Space, costs: Costs, schedule: str, rooms: Sequence[int | None], objective: Objective
) -> Candidate | None:
    placed = _placed(space, costs, schedule, rooms, objective)
    return None if placed is None else _candidate(space, costs, schedule, *placed)


def _placed(
    space: Space,
    costs: Costs,
    schedule: str | None = None,
    rooms: Sequence[int | None] | None = None,
    objective: Objective = "makespan",
) -> Placed | None:
    """The balance and modes that are best by the closed form, or its slowest stage; None if nothing fits."""
    stages = len(space.modes)
    limits = [None] * stages if rooms is None else list(rooms)
    allowed = [modes[:1] if rooms is None else modes for modes in space.modes]
    options = [
        Stage(capacity=room, modes=[_mode(costs, j, name) for name in names])
        for j, (room, names) in enumerate(zip(limits, allowed, strict=True))
    ]
    bounded = rooms is not None and schedule is not None
    split = range(stages) if schedule == "zero_bubble" else ()
    try:
        placed = place(
            [0] * costs.measured.layers,
            options,
            memory=costs.fixed_bytes() if bounded else None,
            activations=shares(costs.profiles[0].layers) if bounded else None,
            boundary=costs.incoming if bounded else None,
            in_flight=held_by(schedule, costs.chunks, stages, split) if bounded and schedule else None,
            objective=objective,
            microbatches=costs.chunks,
            gap=_GAP,
            transfer=_transfer(costs),
        )
    except Infeasible:
        return None
    return placed.sizes, tuple(str(mode) for mode in placed.modes)


def _transfer(costs: Costs) -> list[int] | None:
    """What a cut after each layer costs, if links take time: that of the slowest, there and back."""
    outputs = [layer.output_bytes for layer in costs.profiles[0]]
    ticks = [round(2 * _TICKS * max(link(size) for link in costs.measured.links)) for size in outputs]
    return ticks[:-1] if any(ticks) else None


def _mode(costs: Costs, stage: int, name: str) -> Mode:
    time = [round(_TICKS * seconds) for seconds in costs.work(stage, name)]
    kept = 1 if costs.measured.copied[stage] or name != "never" else 0
    if name == "never":
        return Mode(name, time=time, boundary=kept)
    return Mode(name, time=time, saved=0, transient=2 if name == "except_last" else 1, boundary=kept)
