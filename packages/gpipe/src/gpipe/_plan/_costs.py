"""What stages cost, given what was measured of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from profiler import LayerProfile, Profile

from ..schedule import SPLIT_SECONDS, Kind
from ..schedule._flags import StageMode, runs_of, scheduled
from ..timeline import StageCost
from ..timeline._hops import Link
from ..timeline._kept import kept_bytes
from ._bytes import DeviceBytes, StageBytes, Surroundings, moments

SPLITTING = 130e-6
"""What Python takes to split the backward of a cell (``docs/benchmarks/pipeline.md``)."""


def bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The first layer of each stage, and the end of its layers.

    >>> bounds([2, 3])
    [(0, 2), (2, 5)]
    """
    return list(pairwise(accumulate(sizes, initial=0)))


class SharedParameter(NamedTuple):
    """A parameter that several layers have. A profile counts it for the first of them.

    Attributes:
        layers: their numbers, in order.
        bytes: of the parameter.
        gradient: bytes of its gradient.
    """

    layers: tuple[int, ...]
    bytes: int
    gradient: int


@dataclass(frozen=True)
class Measured:
    """What is known of a model and the devices.

    Attributes:
        profiles: of the layers, on each device.
        optimizer: bytes of its state, for each layer.
        rows: of the mini-batch.
        input_bytes: of the mini-batch.
        input_moves: whether the mini-batch has to be moved to the first device.
        needs_gradient: whether the mini-batch requires a gradient.
        copied: for each stage, whether it gets a copy of its input.
        links: for each stage, how long its input takes from the stage before.
        action: seconds that the engine adds to each action.
        step: seconds that it adds to each step.
        crowding: by how much stages slow each other down, because there are fewer cores than stages.
        replicas: pipes that train the same model on other rows.
        ring: bytes a second from a device to the one of the next replica.
        ties: parameters that several layers have.
    """

    profiles: tuple[Profile, ...]
    optimizer: tuple[int, ...]
    rows: int
    input_bytes: int
    input_moves: bool
    needs_gradient: bool
    copied: tuple[bool, ...]
    links: tuple[Link, ...]
    action: float = 0.0
    step: float = 0.0
    crowding: float = 1.0
    replicas: int = 1
    ring: float = math.inf
    ties: tuple[SharedParameter, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.profiles)

    @property
    def layers(self) -> int:
        return len(self.profiles[0])

    def cut(self, chunks: int) -> Costs:
        """What holds for a mini-batch in so many micro-batches."""
        rows = -(-self.rows // chunks)
        at: dict[int, Profile] = {}
        for profile in self.profiles:
            if id(profile) not in at:
                at[id(profile)] = self._slowed(profile.at(rows))
        return Costs(self, chunks, tuple(at[id(profile)] for profile in self.profiles))

    def _slowed(self, profile: Profile) -> Profile:
        layers = tuple(_times(layer, self.crowding) for layer in profile)
        return replace(profile, layers=layers, loss=profile.loss and _times(profile.loss, self.crowding))


def _times(layer: LayerProfile, factor: float) -> LayerProfile:
    inputs = layer.backward_input_seconds
    return replace(
        layer,
        forward_seconds=factor * (layer.forward_seconds or 0.0),
        backward_seconds=factor * (layer.backward_seconds or 0.0),
        backward_input_seconds=None if inputs is None else factor * inputs,
    )


@dataclass(frozen=True)
class Costs:
    """What layers cost in micro-batches of one size, on each device.

    Attributes:
        measured: where that comes from.
        chunks: how many micro-batches there are.
        profiles: on each device.
    """

    measured: Measured
    chunks: int
    profiles: tuple[Profile, ...]
    _accounts: dict[tuple[object, ...], StageBytes] = field(default_factory=dict, compare=False, repr=False)
    _stages: dict[tuple[object, ...], StageCost] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def incoming(self) -> list[int]:
        """Bytes that enter each layer."""
        first = -(-self.measured.input_bytes // self.chunks)
        return [first, *(layer.output_bytes for layer in self.profiles[0][:-1])]

    def fixed_bytes(self) -> list[int]:
        """What each layer takes whatever the micro-batches: parameters, gradients, and state of the optimizer."""
        return [
            layer.parameter_bytes + layer.buffer_bytes + layer.trainable_bytes + state
            for layer, state in zip(self.profiles[0], self.measured.optimizer, strict=True)
        ]

    def work(self) -> list[float]:
        """Seconds that each layer takes for a micro-batch on the first device."""
        seconds = [(layer.forward_seconds or 0.0) + (layer.backward_seconds or 0.0) for layer in self.profiles[0]]
        seconds[-1] += self._loss_seconds(0)
        return seconds

    def _loss_seconds(self, stage: int) -> float:
        loss = self.profiles[stage].loss
        return (loss.seconds or 0.0) if loss else 0.0

    def stage_costs(self, sizes: Sequence[int], modes: Sequence[StageMode]) -> list[StageCost]:
        """The cost of each stage, for a replay. Layers that have flags are recomputed in the backward.

        Args:
            sizes: the layers of each stage.
            modes: how each is checkpointed.
        """
        stages = zip(bounds(sizes), modes, strict=True)
        return [self.stage_cost(j, first, end, mode) for j, ((first, end), mode) in enumerate(stages)]

    def stage_cost(self, j: int, first: int, end: int, mode: StageMode) -> StageCost:
        """The cost of stage j with the layers from ``first`` to ``end``."""
        key = id(self.profiles[j]), self.measured.copied[j], first, end, mode
        if key not in self._stages:
            whole = self._whole_cost(j, first, end, mode)
            self._stages[key] = whole if isinstance(mode, str) else self._in_pieces(j, first, mode, whole)
        return self._stages[key]

    def _in_pieces(self, j: int, first: int, flags: Sequence[bool], whole: StageCost) -> StageCost:
        """The cost of a stage in pieces, each of which is as much to the engine as an action."""
        pieces, action = list(runs_of(flags)), self.measured.action
        more = (len(pieces) - 1) * action
        again = self.again(j, first, flags) + sum(flag for flag, _, _ in pieces) * action
        loss = self._loss_seconds(j) if first + len(flags) == self.measured.layers and flags[-1] else 0.0
        layers = self.profiles[j][first : first + len(flags)]
        held = sum(layers[b - 1].output_bytes if flag else kept_bytes(layers[a:b]) for flag, a, b in pieces)
        part, rest = whole.backward_input, whole.backward_weight
        return replace(
            whole,
            forward=whole.forward - loss + more,
            backward=whole.backward + loss + again + more,
            backward_input=None if part is None else part + loss + again + more,
            backward_weight=None if rest is None else rest + more,
            activation_bytes=held + (whole.boundary_bytes if self.measured.copied[j] else 0),
        )

    def again(self, j: int, first: int, flags: Sequence[bool]) -> float:
        """Seconds of a micro-batch for recomputation on stage j.

        Args:
            j: the number of the stage.
            first: its first layer.
            flags: of its layers, whether they are recomputed.
        """
        layers = self.profiles[j][first : first + len(flags)]
        return sum(layer.forward_seconds or 0.0 for layer, flag in zip(layers, flags, strict=True) if flag)

    def _whole_cost(self, j: int, first: int, end: int, mode: StageMode) -> StageCost:
        layers = self.profiles[j][first:end]
        action = self.measured.action
        forward = sum(layer.forward_seconds or 0.0 for layer in layers)
        backward = sum(layer.backward_seconds or 0.0 for layer in layers)
        # It turns around where the output is there, which under checkpointing is the recomputation.
        loss = self._loss_seconds(j) if end == len(self.profiles[j]) else 0.0
        inputs = [layer.backward_input_seconds for layer in layers]
        known = [seconds for seconds in inputs if seconds is not None]
        part = min(backward, sum(known)) if len(known) == len(inputs) else None
        kept = self.incoming[first] if self.measured.copied[j] else 0
        return StageCost(
            forward=forward + action + (loss if scheduled(mode) == "never" else 0.0),
            backward=backward + action,
            recompute=forward + loss + action,
            backward_input=None if part is None else part + action + SPLITTING / 2,
            backward_weight=None if part is None else backward - part + action + SPLITTING / 2,
            activation_bytes=kept_bytes(layers) + kept,
            boundary_bytes=self.incoming[first],
            layers=", ".join(layer.name for layer in layers),
        )

    def split(self, sizes: Sequence[int], stages: Sequence[StageCost]) -> tuple[int, ...]:
        """The stages whose backward is worth splitting under zero bubble, where autograd can.

        Args:
            sizes: the layers of each stage.
            stages: what each costs.
        """
        each = enumerate(zip(stages, bounds(sizes), strict=True))
        return tuple(j for j, (stage, (first, end)) in each if self.splits(j, first, end, stage))

    def splits(self, j: int, first: int, end: int, stage: StageCost) -> bool:
        """The same for stage j with the layers from ``first`` to ``end``, which cost what ``stage`` says."""
        return (
            stage.backward_input is not None
            and stage.seconds(Kind.BACKWARD) >= SPLIT_SECONDS
            and (j > 0 or self.measured.needs_gradient)
            and any(layer.trainable_bytes for layer in self.profiles[j][first:end])
        )

    def gradient_bytes(self, sizes: Sequence[int]) -> list[int]:
        """What the gradients of each stage take."""
        layers = self.profiles[0].layers
        return [sum(layer.trainable_bytes for layer in layers[first:end]) for first, end in bounds(sizes)]

    def reduction(self, sizes: Sequence[int]) -> float:
        """Seconds until the replicas have the average of their gradients: of the largest stage, on a ring.

        Stages are on devices of their own and reduce at the same time (Patarasu and Yuan, 2009).
        """
        r = self.measured.replicas
        return 2 * (r - 1) / r * max(self.gradient_bytes(sizes)) / self.measured.ring

    def hops(self, sizes: Sequence[int]) -> list[float]:
        """For each stage, the seconds that its input takes from the stage before."""
        links = zip(bounds(sizes), self.measured.links, strict=True)
        return [link(self.incoming[first]) if first else 0.0 for (first, _), link in links]

    def device_bytes(
        self, sizes: Sequence[int], modes: Sequence[StageMode], schedule: str, split: Sequence[int] = ()
    ) -> tuple[DeviceBytes, ...]:
        """What each device holds at its fullest moment.

        Args:
            sizes: the layers of each stage.
            modes: how each is checkpointed.
            schedule: its name.
            split: the stages whose backward is split.
        """
        stages = enumerate(zip(bounds(sizes), modes, strict=True))
        return tuple(self.stage_bytes(j, *own, mode, schedule, j in split) for j, (own, mode) in stages)

    def stage_bytes(self, j: int, first: int, end: int, mode: StageMode, schedule: str, splits: bool) -> DeviceBytes:
        """The same for stage j with the layers from ``first`` to ``end``, however the others are checkpointed."""
        found = self._account(j, first, end, mode, drains=schedule == "fill_drain")
        return found.at_peak(moments(schedule, scheduled(mode), self.chunks, self.measured.stages, j, splits))

    def _account(self, j: int, first: int, end: int, mode: StageMode, *, drains: bool) -> StageBytes:
        """The account of stage j, if it has the layers from ``first`` to ``end``."""
        measured, is_last = self.measured, end == self.measured.layers
        copied, apart = measured.copied[j], is_last or measured.copied[j + 1]
        key = id(self.profiles[j]), copied, apart, j == 0, drains, first, end, mode
        if key in self._accounts:
            return self._accounts[key]
        layers, skips = self.profiles[j][first:end], self.profiles[j].skips
        # Sources before the stage, and targets behind it, have numbers that it has no layers of.
        own = [(s.source - first, s.target - first, s.bytes) for s in skips if s.source < end and s.target >= first]
        popped = sum(size for source, target, size in own if source < 0 and target < end - first)
        around = Surroundings(
            incoming=self.incoming[first] + popped,
            skips=own,
            copied=copied,
            moved=measured.input_bytes if j == 0 and measured.input_moves else 0,
            returned=("all" if drains else "one") if j else "all" if measured.needs_gradient else "none",
            loss=self.profiles[j].loss if is_last else None,
            turned=layers[-1].output_bytes if is_last else 0,
            sent=0 if apart else layers[-1].output_bytes,
        )
        ties = [tie for tie in measured.ties if tie.layers[0] < first and any(first <= k < end for k in tie.layers)]
        tied = sum(tie.bytes for tie in ties), sum(tie.gradient for tie in ties)
        found = StageBytes(layers, mode, around, tied, sum(measured.optimizer[first:end]))
        self._accounts[key] = found
        return found
