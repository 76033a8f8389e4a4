"""What a schedule is searched for: stages with their costs, the workers that they are on, and limits of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._cached_property import cached_property
from ._actions import Kind
from ._replay import KindSeconds

Limits = float | None | Sequence[float | None]
"""The most bytes that a worker may hold: one number for all workers, or one per worker; None is no limit."""


@dataclass(frozen=True)
class Problem:
    """The stages, workers and limits that a schedule is searched for.

    Attributes:
        microbatches: m.
        placement: the worker of each stage, counted from 0 without gaps.
        seconds: the durations of the actions of each stage, by kind.
        hops: the transfer time to each stage from the previous one.
        whole: bytes that each stage saves for the backward of a micro-batch.
        bare: bytes that it keeps of a checkpointed micro-batch before its recomputation.
        limits: the most bytes of each worker; None is no limit.
        stops: the first micro-batch of each stage that is not checkpointed, at most m.
        split: whether the backward of each stage is split.
    """

    microbatches: int
    placement: tuple[int, ...]
    seconds: KindSeconds
    hops: tuple[float, ...]
    whole: tuple[int, ...]
    bare: tuple[int, ...]
    limits: tuple[float | None, ...]
    stops: tuple[int, ...]
    split: tuple[bool, ...]

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def workers(self) -> int:
        return len(self.limits)

    @cached_property
    def owned(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each worker, in ascending order."""
        return tuple(tuple(j for j in range(self.stages) if self.placement[j] == r) for r in range(self.workers))

    @cached_property
    def actions(self) -> int:
        """The number of actions of a step."""
        return self.microbatches * (2 * self.stages + sum(self.split)) + sum(self.stops)

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """The least seconds that each worker computes for one micro-batch that is not checkpointed."""
        return tuple(sum(map(self._load, own)) for own in self.owned)

    def _load(self, stage: int) -> float:
        seconds = self.seconds[stage]
        # Some schedules run the backward of a stage unsplit in some micro-batches.
        parts = seconds[Kind.BACKWARD_INPUT] + seconds[Kind.BACKWARD_WEIGHT]
        whole = seconds[Kind.BACKWARD]
        return seconds[Kind.FORWARD] + (min(whole, parts) if self.split[stage] else whole)

    def kinds(self, stage: int) -> tuple[Kind, ...]:
        """Return the kinds of the actions that the stage runs on each micro-batch."""
        if self.split[stage]:
            return Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
        return Kind.FORWARD, Kind.BACKWARD

    def first_bytes(self, stage: int, microbatch: int) -> int:
        """Return the bytes that a forward leaves: only the input if the micro-batch is checkpointed."""
        return self.bare[stage] if microbatch < self.stops[stage] else self.whole[stage]

    def changes(self, stage: int, microbatch: int) -> dict[Kind, int]:
        """Return by how many bytes each kind of action changes what the stage holds."""
        whole = self.whole[stage]
        return {
            Kind.FORWARD: self.first_bytes(stage, microbatch),
            Kind.RECOMPUTE: whole - self.bare[stage],
            Kind.BACKWARD: -whole,
            Kind.BACKWARD_INPUT: 0,
            Kind.BACKWARD_WEIGHT: -whole,  # it still reads the saved tensors
        }
