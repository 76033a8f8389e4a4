"""Candidate configurations with predicted time and memory, and the :class:`SearchSpace` that is searched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .._cached_property import cached_property
from ..schedule import LOSS_OF_ALL, Kind, Schedule, checkpoint_stops, named
from ..schedule._loads import with_loads
from ..schedule._modes import offloading_stages
from ..schedule._named import BREADTH_FIRST, lanes
from ..schedule._offloads import with_offloads
from ..schedule._replay import Lane, makespan, steps_of_lanes
from ._arguments import SCHEDULES, SEARCH
from ._bytes import DeviceBytes
from ._costs import Costs, Measured, bounds


@dataclass(frozen=True)
class SearchSpace:
    """The configurations to search for one placement of stages.

    Attributes:
        measured: the costs, and the device of each stage.
        chunks: the numbers of micro-batches.
        schedules: the names of the schedules with this placement.
        modes: the checkpoint modes that a stage may have.
        memory: the limit of each device, shared equally by its stages; None for no limit.
        scale: the bytes of a dry run divided by the estimated bytes, per device; empty before a dry run.
    """

    measured: Measured
    chunks: Sequence[int]
    schedules: Sequence[str]
    modes: Sequence[str]
    memory: Sequence[int | None]
    scale: tuple[float, ...] = ()

    @cached_property
    def limits(self) -> list[float | None]:
        """The limit of each device for estimated bytes."""
        scale = self.scale or (1.0,) * len(self.memory)
        return [None if size is None else size / more for size, more in zip(self.memory, scale, strict=True)]

    @cached_property
    def rooms(self) -> list[float | None]:
        """The limit of each stage: an equal part of its device's limit."""
        placement = self.measured.placement
        return [
            None if (whole := self.limits[place]) is None else whole / placement.count(place) for place in placement
        ]

    def share(self, j: int, size: int) -> float:
        """Return ``size`` as a share of the limit of stage ``j``."""
        room = self.rooms[j]
        return 0.0 if room is None else size / max(room, 1)

    def compute_share(self, candidate: Candidate) -> float:
        """Return the largest share of any stage; above 1 if the candidate does not fit."""
        stages = enumerate(zip(bounds(candidate.sizes), candidate.modes, strict=True))
        needs = (
            candidate.costs.stage_bytes(j, *own, mode, candidate.schedule, j in candidate.split)
            for j, (own, mode) in stages
        )
        return max(self.share(j, need.total) for j, need in enumerate(needs))


@dataclass(frozen=True)
class Candidate:
    """A configuration with its predicted time and memory.

    Attributes:
        costs: the costs of layers on its micro-batches.
        schedule: the name of the schedule.
        sizes: the number of layers of each stage.
        modes: the checkpoint mode of each stage.
        seconds: the seconds of a step.
        split: the indices of the stages whose backward is split.
        dry_run_bytes: the bytes of each device in a dry run; empty before a dry run.
        note: how the bytes were obtained, as a note of the plan.
        order: the searched schedule; None for a named one.
    """

    costs: Costs
    schedule: str
    sizes: tuple[int, ...]
    modes: tuple[str, ...]
    seconds: float
    split: tuple[int, ...] = ()
    dry_run_bytes: tuple[DeviceBytes, ...] = ()
    note: str = ""
    order: Schedule | None = None

    @property
    def chunks(self) -> int:
        return self.costs.chunks

    @cached_property
    def account(self) -> tuple[DeviceBytes, ...]:
        if self.order is not None:
            return self.costs.device_bytes_in(self.order, self.sizes, self.modes)
        return self.costs.device_bytes(self.sizes, self.modes, self.schedule, self.split)

    def compute_fixed_bytes(self, device: int) -> int:
        """Return the bytes of a device that do not depend on the number of micro-batches in flight."""
        need = self.account[device]
        on = [j for j, place in enumerate(self.costs.measured.placement) if place == device]
        own = [self.costs.get_stage_bytes(*bounds(self.sizes)[j]).kept for j in on]
        return need.total - need.activations - min(own)

    @property
    def bytes(self) -> tuple[DeviceBytes, ...]:
        return self.dry_run_bytes or self.account

    @cached_property
    def host_bytes(self) -> int:
        return self.costs.host_bytes(self.sizes, self.modes, self.schedule, self.split)

    def fits(self, memory: Sequence[float | None]) -> bool:
        """Return whether the bytes of the host and of each device are within its limit."""
        limits = zip(self.bytes, memory, strict=True)
        return self.fits_host and all(room is None or need.total <= room for need, room in limits)

    @property
    def fits_host(self) -> bool:
        memory = self.costs.measured.host.memory
        return memory is None or self.host_bytes <= memory

    @property
    def fullest(self) -> int:
        return max(each.total for each in self.bytes)

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that identify the configuration."""
        return self.chunks, self.schedule, self.split, self.sizes, self.modes

    @property
    def simplicity(self) -> tuple[int, int, int]:
        """A sort key, lower for simpler ones: the number of stages, then chunks, then the rank of the schedule."""
        return len(self.sizes), self.chunks, (*SCHEDULES, BREADTH_FIRST, SEARCH).index(self.schedule)

    def program(self, microbatches: int) -> Schedule:
        if self.order is not None:
            return self.order
        measured = self.costs.measured
        return build_schedule(
            self.schedule,
            microbatches,
            measured.placement,
            self.modes,
            self.split,
            offload=measured.host.parameters,
            whole_loss=measured.whole_loss,
        )


def build_schedule(
    schedule: str,
    microbatches: int,
    placement: Sequence[int],
    modes: Sequence[str],
    split: Sequence[int],
    *,
    offload: bool,
    whole_loss: bool,
) -> Schedule:
    """Return the planned schedule, with all transfers from and to the host, and the loss of the full mini-batch."""
    found = named(schedule, microbatches, placement, compute_stops(modes, microbatches), split)
    found = found.loading(placement) if offload else found
    if stages := offloading_stages(modes, len(modes)):
        found = found.offloading(placement, stages)
    return found.with_loss() if whole_loss else found


def build_candidate(costs: Costs, schedule: str, sizes: Sequence[int], modes: Sequence[str]) -> Candidate:
    """Return the candidate with this balance and these modes, timed by a replay of its schedule."""
    m, stages = costs.chunks, costs.stage_costs(sizes, modes)
    each = enumerate(zip(bounds(sizes), stages, strict=True))
    split = tuple(j for j, (own, stage) in each if costs.splits(schedule, *own, stage))
    steps = lanes(schedule, m, costs.measured.placement, compute_stops(modes, m), split)
    if costs.measured.whole_loss:
        steps = [_with_loss(lane, len(stages) - 1, m) for lane in steps]
    if costs.measured.host.parameters:
        steps = with_loads(steps_of_lanes(steps), range(len(stages)))
    if offloading := offloading_stages(modes, len(modes)):
        steps = with_offloads(steps_of_lanes(steps), offloading)
    pipeline = makespan(steps, m, [{kind: each.seconds(kind) for kind in Kind} for each in stages], costs.hops(sizes))
    seconds = pipeline + costs.measured.step
    return Candidate(costs, schedule, tuple(sizes), tuple(modes), seconds, split)


def _with_loss(lane: Lane, last: int, microbatches: int) -> Iterator[tuple[int, tuple[Kind, int]]]:
    """Yield the steps of a worker, with the loss of the full mini-batch after the forwards of the ``last`` stage."""
    left = microbatches
    for step in lane:
        yield step
        if step[0] == last and step[1][0] is Kind.FORWARD:
            left -= 1
            if not left:
                yield last, LOSS_OF_ALL


def by_seconds(found: Iterable[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda each: each.seconds)


def compute_stops(modes: Sequence[str], microbatches: int) -> tuple[int, ...]:
    """Return for each stage the index below which micro-batches are checkpointed."""
    return checkpoint_stops(modes, microbatches, len(modes))
