"""Candidates: configurations of a pipe, with their predicted time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..schedule import Kind, Schedule, checkpoint_stops, named
from ..schedule._flags import StageMode, scheduled
from ..schedule._makespan import makespan
from ..schedule._named import lanes
from ._arguments import SCHEDULES
from ._costs import Costs, Measured, busy
from ._memory import DeviceBytes


@dataclass(frozen=True)
class Space:
    """The space of configurations that is searched.

    Attributes:
        measured: the costs.
        chunks: numbers of micro-batches.
        schedules: names.
        modes: those that each stage may have. Flags are of all layers, of which a stage has its own.
        memory: what each device may hold; None is any amount.
        pieces: whether only some layers of a stage may be computed again.
    """

    measured: Measured
    chunks: Sequence[int]
    schedules: Sequence[str]
    modes: Sequence[tuple[StageMode, ...]]
    memory: Sequence[int | None]
    pieces: bool = False

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
        modes: of checkpointing, for each stage, or flags of its layers.
        bytes: what each device holds.
        seconds: of a step: by the closed form, or once it was replayed by that.
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

    @property
    def in_pieces(self) -> bool:
        """Whether only some layers of a stage are computed again."""
        return any(not isinstance(way, str) for way in self.modes)


def candidate_of(
    space: Space, costs: Costs, schedule: str, sizes: tuple[int, ...], modes: tuple[StageMode, ...]
) -> Candidate:
    """The candidate with this balance and these modes, with seconds by a closed form and what each device holds.

    The seconds are those of one micro-batch through all stages, and of the others through the slowest.

    Args:
        space: what is searched.
        costs: of micro-batches of one size.
        schedule: its name.
        sizes: the layers of each stage.
        modes: of checkpointing.
    """
    stages = costs.stage_costs(sizes, modes)
    split = costs.split(sizes, stages) if schedule == "zero_bubble" else ()
    times = list(map(busy, stages, modes))
    seconds = sum(times) + (costs.chunks - 1) * max(times) + 2 * sum(costs.hops(sizes))
    seconds += costs.reduction(sizes) + costs.measured.step
    needs = costs.device_bytes(sizes, modes, schedule, split)
    return Candidate(costs, schedule, split, sizes, modes, needs, seconds)


def lacking(space: Space, candidate: Candidate) -> dict[int, int]:
    """The bytes that devices are short of."""
    limits = enumerate(zip(candidate.bytes, space.memory, strict=True))
    return {j: need.total - room for j, (need, room) in limits if room is not None and need.total > room}


def replayed(candidate: Candidate) -> float:
    """The seconds of a step, by a replay of the schedule with the costs of its actions."""
    costs, m = candidate.costs, candidate.chunks
    stages = costs.stage_costs(candidate.sizes, candidate.modes)
    steps = lanes(candidate.schedule, m, range(len(stages)), stops_of(candidate.modes, m), candidate.split)
    seconds = [{kind: stage.seconds(kind) for kind in Kind} for stage in stages]
    pipeline = makespan(steps, m, seconds, costs.hops(candidate.sizes))
    return pipeline + costs.reduction(candidate.sizes) + costs.measured.step


def with_replay(candidate: Candidate) -> Candidate:
    """The same with the seconds of a replay instead of those of the closed form."""
    return replace(candidate, seconds=replayed(candidate))


def with_costs(candidate: Candidate, measured: Measured) -> Candidate:
    """The same with other costs, by which it is replayed."""
    return with_replay(replace(candidate, costs=measured.cut(candidate.chunks)))


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
