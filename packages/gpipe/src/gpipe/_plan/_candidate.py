"""Candidates: ways to train, with their predicted time and memory. What may be searched is a :class:`Space`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..schedule import Kind, Schedule, checkpoint_stops, named
from ..schedule._flags import StageMode, scheduled
from ..schedule._named import lanes
from ..schedule._replay import makespan
from ..timeline import StageCost
from ._arguments import SCHEDULES
from ._bytes import DeviceBytes
from ._costs import Costs, Measured


@dataclass(frozen=True)
class Space:
    """The space of configurations that is searched.

    Attributes:
        measured: the costs.
        chunks: numbers of micro-batches.
        schedules: names.
        modes: those that each stage may have.
        memory: what each device may hold; None is any amount.
        pieces: whether only some layers of a stage may be computed again.
        scale: for each device, how much more than the account of bytes a rehearsal took; empty before there was one.
    """

    measured: Measured
    chunks: Sequence[int]
    schedules: Sequence[str]
    modes: Sequence[tuple[str, ...]]
    memory: Sequence[int | None]
    pieces: bool = False
    scale: tuple[float, ...] = ()

    @property
    def is_bounded(self) -> bool:
        """Whether memory can be short."""
        return any(size is not None for size in self.memory)

    def share(self, j: int, size: int) -> float:
        """The bytes of device j as a share of what it may hold."""
        room = self.memory[j]
        return 0.0 if room is None else size * (self.scale[j] if self.scale else 1.0) / max(room, 1)


@dataclass(frozen=True)
class Candidate:
    """A way to train.

    Attributes:
        costs: of its micro-batches.
        schedule: its name.
        split: stages whose backward is split.
        sizes: layers of each stage.
        modes: of checkpointing, for each stage, or flags of its layers.
        bytes: what each device holds.
        seconds: of a step.
    """

    costs: Costs
    schedule: str
    split: tuple[int, ...]
    sizes: tuple[int, ...]
    modes: tuple[StageMode, ...]
    bytes: tuple[DeviceBytes, ...]
    seconds: float

    @property
    def chunks(self) -> int:
        return self.costs.chunks

    @property
    def fullest(self) -> int:
        """The bytes of the device that holds the most."""
        return max(each.total for each in self.bytes)


def candidate_of(
    costs: Costs, schedule: str, sizes: Sequence[int], modes: Sequence[StageMode], split: Sequence[int] | None = None
) -> Candidate:
    """The candidate with this balance and these modes, with the seconds of a replay and what each device holds.

    Args:
        costs: of micro-batches of one size.
        schedule: its name.
        sizes: the layers of each stage.
        modes: of checkpointing.
        split: the stages whose backward is split; by default those where it is worth it.
    """
    stages = costs.stage_costs(sizes, modes)
    if split is None:
        split = costs.split(sizes, stages) if schedule == "zero_bubble" else ()
    seconds = step_seconds(costs, schedule, sizes, modes, split, stages)
    needs = costs.device_bytes(sizes, modes, schedule, split)
    return Candidate(costs, schedule, tuple(split), tuple(sizes), tuple(modes), needs, seconds)


def step_seconds(
    costs: Costs,
    schedule: str,
    sizes: Sequence[int],
    modes: Sequence[StageMode],
    split: Sequence[int],
    stages: Sequence[StageCost],
) -> float:
    """The seconds of a step, by a replay of the schedule with the costs of its actions."""
    m = costs.chunks
    steps = lanes(schedule, m, range(len(stages)), stops_of(modes, m), split)
    pipeline = makespan(steps, m, [seconds_of(stage) for stage in stages], costs.hops(sizes))
    return pipeline + costs.reduction(sizes) + costs.measured.step


def seconds_of(stage: StageCost) -> dict[Kind, float]:
    """The seconds of each kind of action."""
    return {kind: stage.seconds(kind) for kind in Kind}


def lacking(space: Space, candidate: Candidate) -> dict[int, int]:
    """The bytes that devices are short of, by the account or by the rehearsal that the candidate's bytes are of."""
    limits = enumerate(zip(candidate.bytes, space.memory, strict=True))
    return {j: need.total - room for j, (need, room) in limits if room is not None and need.total > room}


def key(candidate: Candidate) -> tuple[object, ...]:
    """What tells one way to train from another."""
    return candidate.chunks, candidate.schedule, candidate.split, candidate.sizes, candidate.modes


def by_seconds(found: Iterable[Candidate]) -> list[Candidate]:
    """The fastest first."""
    return sorted(found, key=lambda each: each.seconds)


def stops_of(modes: Sequence[StageMode], microbatches: int) -> tuple[int, ...]:
    """The micro-batches that each stage checkpoints: those below."""
    return checkpoint_stops([*map(scheduled, modes)], microbatches, len(modes))


def schedule_of(name: str, microbatches: int, modes: Sequence[StageMode], split: Sequence[int]) -> Schedule:
    """The schedule, with each stage on a device of its own."""
    return named(name, microbatches, range(len(modes)), stops_of(modes, microbatches), split)


def simplicity(candidate: Candidate) -> tuple[int, int, int]:
    """Less is simpler: chunks, then the schedule, then memory."""
    return candidate.chunks, SCHEDULES.index(candidate.schedule), candidate.fullest
