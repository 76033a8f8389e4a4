"""Stage costs, computed from measured layer costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from profiler import LayerProfile, Profile

from .._cached_property import cached_property
from ..schedule import SPLIT_SECONDS, SPLITTING, Kind, Schedule, checkpoint_stops
from ..timeline import StageCost
from ..timeline._hops import Link
from ._arguments import OFFLOAD
from ._bytes import DeviceBytes, StageBytes, compute_kept_and_peak, in_flight_peaks, in_flight_peaks_in
from ._host import Host, device_bytes, parameter_bytes, share_of_device

SPLIT_PYTHON = 130e-6
"""The seconds of Python overhead to split one backward (``docs/benchmarks/pipeline.md``)."""


def bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first layer of each stage, and the end of its layers.

    >>> bounds([2, 3])
    [(0, 2), (2, 5)]
    """
    return list(pairwise(accumulate(sizes, initial=0)))


Value = TypeVar("Value")


class SharedParameter(NamedTuple):
    """A parameter that several layers share. A profile counts it for the first of them."""

    layers: tuple[int, ...]
    bytes: int
    gradient: int


@dataclass(frozen=True)
class Measured:
    """The measured properties of a model and the devices.

    Attributes:
        profile: the profile of the layers on a device with a speed of one.
        optimizer: the bytes of the optimizer's state per layer.
        rows: the number of rows of the mini-batch.
        input_bytes: the bytes of the mini-batch.
        needs_gradient: whether the mini-batch requires a gradient.
        separate_memory: whether each device has its own memory, so that stages copy their inputs.
        keeps_outputs: whether to count the output that a cell keeps until its backward, if memory is separate.
        placement, links: the device of each stage, and the link to it from the previous stage.
        action, step: the seconds that the engine adds per action and per step.
        cpu_contention: the factor by which devices slow each other down if there are fewer CPU cores than devices.
        ties: the parameters that several layers share.
        whole_loss: whether the loss is computed once, on the outputs of the full mini-batch.
        host: the host.
        speeds: the relative speed of each device.
        order: for each device, its index in the argument ``devices``.
    """

    profile: Profile
    optimizer: tuple[int, ...]
    rows: int
    input_bytes: int
    needs_gradient: bool
    separate_memory: bool
    placement: tuple[int, ...]
    links: tuple[Link, ...]
    action: float = 0.0
    step: float = 0.0
    cpu_contention: float = 1.0
    ties: tuple[SharedParameter, ...] = ()
    whole_loss: bool = False
    host: Host = field(default_factory=Host)
    speeds: tuple[float, ...] = ()
    order: tuple[int, ...] = ()
    keeps_outputs: bool = True

    def reorder(self, values: Sequence[Value]) -> list[Value]:
        """Return values for the devices that the caller passed, in the order of these devices."""
        return [values[k] for k in self.order] if self.order else [*values]

    def speed(self, stage: int) -> float:
        return self.speeds[self.placement[stage]] if self.speeds else 1.0

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def devices(self) -> int:
        return max(self.placement) + 1

    @property
    def layers(self) -> int:
        return len(self.profile)

    def cut(self, chunks: int) -> Costs:
        return Costs(self, chunks, self.profile.at(-(-self.rows // chunks)))


@dataclass(frozen=True)
class Costs:
    """The costs of layers on micro-batches of one size. A stage is given by its range of layers."""

    measured: Measured
    chunks: int
    profile: Profile
    _sizes: dict[tuple[int, int], StageBytes] = field(default_factory=dict, compare=False, repr=False)
    _costs: dict[tuple[int, int, str, float], StageCost] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def incoming(self) -> list[int]:
        return [
            -(-self.measured.input_bytes // self.chunks),
            *(layer.output_bytes for layer in self.profile.layers[:-1]),
        ]

    def work(self) -> list[float]:
        """Return the seconds of each layer per micro-batch, on a device with a speed of one."""
        seconds = [self._forward([layer]) + self._backward([layer]) for layer in self.profile]
        seconds[-1] += self._loss(len(seconds))
        return seconds

    def _forward(self, layers: Sequence[LayerProfile]) -> float:
        return self.measured.cpu_contention * sum(layer.forward_seconds or 0.0 for layer in layers)

    def _backward(self, layers: Sequence[LayerProfile]) -> float:
        return self.measured.cpu_contention * sum(layer.backward_seconds or 0.0 for layer in layers)

    def _backward_input(self, layers: Sequence[LayerProfile]) -> float | None:
        known = [each.backward_input_seconds for each in layers if each.backward_input_seconds is not None]
        return self.measured.cpu_contention * sum(known) if len(known) == len(layers) else None

    def _loss(self, end: int) -> float:
        """Return the seconds of a micro-batch's loss in the stage that ends at layer ``end``."""
        return 0.0 if self.measured.whole_loss else self._loss_alone(end)

    def _loss_alone(self, end: int) -> float:
        loss = self.profile.loss if end == self.measured.layers else None
        return self._forward([loss]) + self._backward([loss]) if loss else 0.0

    def _whole_loss(self, end: int, speed: float) -> float:
        """Return the seconds of the full mini-batch's loss in the stage that ends at layer ``end``.

        It does not overlap with other actions.
        """
        if not self.measured.whole_loss or end < self.measured.layers:
            return 0.0
        return self.chunks * self._loss_alone(end) / speed + self.measured.action

    def stage_costs(self, sizes: Sequence[int], modes: Sequence[str]) -> list[StageCost]:
        """Return the cost of each stage for a replay."""
        stages = enumerate(zip(bounds(sizes), modes, strict=True))
        return [self.stage_cost(j, *own, mode) for j, (own, mode) in stages]

    def stage_cost(self, j: int, first: int, end: int, mode: str) -> StageCost:
        """Return the cost of stage ``j`` with these layers on a micro-batch."""
        key = first, end, mode, self.measured.speed(j)
        if key not in self._costs:
            self._costs[key] = self._stage_cost(*key)
        return self._costs[key]

    def _stage_cost(self, first: int, end: int, mode: str, speed: float) -> StageCost:
        layers, action = self.profile.layers[first:end], self.measured.action
        forward, backward, loss = (
            each / speed for each in (self._forward(layers), self._backward(layers), self._loss(end))
        )
        part = self._backward_input(layers)
        part = None if part is None else min(backward, part / speed)
        sizes = self.get_stage_bytes(first, end)
        trip = sizes.far / self.measured.host.bandwidth if mode == OFFLOAD else 0.0
        return StageCost(
            # The loss follows the output; if the stage recomputes, the recomputed one.
            forward=forward + (loss if mode == "never" else 0.0) + action,
            backward=backward + action,
            recompute=forward + loss + action,
            backward_input=None if part is None else part + action + SPLIT_PYTHON / 2,
            backward_weight=None if part is None else backward - part + action + SPLIT_PYTHON / 2,
            loss=self._whole_loss(end, speed),
            load=self._of_parameters(sum(each.parameter_bytes for each in layers)),
            unload=self._of_parameters(sum(each.trainable_bytes for each in layers)),
            offload=trip,
            prefetch=trip,
            activation_bytes=sizes.kept,
            boundary_bytes=self.incoming[first],
            layers=", ".join(layer.name for layer in layers),
        )

    def _of_parameters(self, size: int) -> float:
        """Return the seconds in which bytes of parameters or gradients move, if parameters are on the host."""
        return size / self.measured.host.bandwidth if self.measured.host.parameters else 0.0

    def splits(self, schedule: str, first: int, end: int, stage: StageCost) -> bool:
        """Return whether the backward of a stage with this cost is split: if autograd can split it, and it pays."""
        return (
            schedule in SPLITTING
            and stage.backward_input is not None
            and stage.seconds(Kind.BACKWARD) >= SPLIT_SECONDS
            and (first > 0 or self.measured.needs_gradient)
            and any(layer.trainable_bytes for layer in self.profile.layers[first:end])
        )

    def hops(self, sizes: Sequence[int]) -> list[float]:
        """Return for each stage the seconds in which its input arrives from the previous stage."""
        links = zip(bounds(sizes), self.measured.links, strict=True)
        return [link(self.incoming[first]) if first else 0.0 for (first, _), link in links]

    def device_bytes_in(self, order: Schedule, sizes: Sequence[int], modes: Sequence[str]) -> tuple[DeviceBytes, ...]:
        """Return the peak bytes of each device, as :meth:`device_bytes`, in an order of actions."""
        found, placement = [DeviceBytes(0, 0, 0, 0, 0)] * self.measured.devices, self.measured.placement
        lines, stops = order.on(placement), checkpoint_stops(modes, self.chunks, len(modes))
        for j, (own, mode, place) in enumerate(zip(bounds(sizes), modes, placement, strict=True)):
            found[place] += self.get_stage_bytes(*own).at_peak(in_flight_peaks_in(lines[place], j, stops[j]), mode)
        return tuple(found)

    def device_bytes(
        self, sizes: Sequence[int], modes: Sequence[str], schedule: str, split: Sequence[int] = ()
    ) -> tuple[DeviceBytes, ...]:
        """Return the peak bytes of each device; an upper bound for several stages per device."""
        found = [DeviceBytes(0, 0, 0, 0, 0)] * self.measured.devices
        for j, (own, mode, place) in enumerate(zip(bounds(sizes), modes, self.measured.placement, strict=True)):
            found[place] += self.stage_bytes(j, *own, mode, schedule, j in split)
        return tuple(found)

    def stage_bytes(self, j: int, first: int, end: int, mode: str, schedule: str, splits: bool) -> DeviceBytes:
        """Return the peak bytes of stage ``j``, which do not depend on the modes of other stages."""
        placement = self.measured.placement
        found = self._at_peak(j, first, end, mode, schedule, splits)
        # With parameters on the host, an equal part of the device's bytes: see device_bytes_with_host.
        return share_of_device(found, placement.count(placement[j])) if self.measured.host.parameters else found

    def device_bytes_with_host(
        self, sizes: Sequence[int], modes: Sequence[str], schedule: str
    ) -> tuple[DeviceBytes, ...]:
        """Return the peak bytes of each device, whose stages have their parameters on the host."""
        stages, layers = list[DeviceBytes](), self.profile.layers
        for j, (own, mode) in enumerate(zip(bounds(sizes), modes, strict=True)):
            stages.append(self._at_peak(j, *own, mode, schedule, splits=False))
        buffers = [sum(layer.buffer_bytes for layer in layers[first:end]) for first, end in bounds(sizes)]
        return device_bytes(self.measured.placement, stages, buffers)

    def _at_peak(self, j: int, first: int, end: int, mode: str, schedule: str, splits: bool) -> DeviceBytes:
        moments = in_flight_peaks(schedule, mode, self.chunks, self.measured.placement, j, splits)
        return self.get_stage_bytes(first, end).at_peak(moments, mode)

    def host_bytes(self, sizes: Sequence[int], modes: Sequence[str], schedule: str, split: Sequence[int] = ()) -> int:
        """Return the peak bytes on the host; an upper bound, as the peaks of stages may occur at different times."""
        found, placement = parameter_bytes(self.measured), self.measured.placement
        for j, (own, mode) in enumerate(zip(bounds(sizes), modes, strict=True)):
            if mode == OFFLOAD:
                moments = in_flight_peaks(schedule, mode, self.chunks, placement, j, j in split)
                found += max(each.inputs_only for each in moments) * self.get_stage_bytes(*own).far
        return found

    def get_stage_bytes(self, first: int, end: int) -> StageBytes:
        """Return the bytes of a stage with these layers."""
        if (first, end) not in self._sizes:
            self._sizes[first, end] = self._compute_stage_bytes(first, end)
        return self._sizes[first, end]

    def _compute_stage_bytes(self, first: int, end: int) -> StageBytes:
        layers, measured = self.profile.layers[first:end], self.measured
        loss = self.profile.loss if end == measured.layers else None
        whole = measured.whole_loss and end == measured.layers
        kept, peak = compute_kept_and_peak(layers, None if whole else loss)
        output = layers[-1].output_bytes if whole else 0
        if whole:
            peak = self._peak_of_all(peak, kept, output, loss)
        # In shared memory, the input belongs to the previous stage, as its output, or to the caller.
        copied = self.incoming[first] if measured.separate_memory and first else 0
        moved = measured.input_bytes if measured.separate_memory and not first else 0
        ties = [tie for tie in measured.ties if tie.layers[0] < first and any(first <= k < end for k in tie.layers)]
        bare, last = copied + output, layers[-1].output_bytes
        # A cell keeps its output until its backward. In shared memory, it is the input of the next stage.
        is_kept = measured.separate_memory and measured.keeps_outputs
        sent = last if is_kept and end < measured.layers else 0
        return StageBytes(
            parameters=sum(each.parameter_bytes + each.buffer_bytes for each in layers) + sum(t.bytes for t in ties),
            gradients=sum(each.trainable_bytes for each in layers) + sum(tie.gradient for tie in ties),
            optimizer=sum(measured.optimizer[first:end]),
            kept=kept + copied + sent,
            # Gradients needed by the backward of the weights; inside a layer, as large as its saved tensors.
            waiting=sum(layer.saved_bytes for layer in layers if layer.trainable_bytes),
            bare=bare,
            # A stage keeps its output, as it keeps its input.
            near=min(kept + copied + sent, max(bare, copied + last)),
            transient=peak + copied + moved,
        )

    def _peak_of_all(self, peak: int, kept: int, output: int, loss: LayerProfile | None) -> int:
        """Return the peak bytes of a micro-batch on the last stage, if the loss is computed on the full mini-batch."""
        # The loss joins the outputs and adds their gradient, which stays until all backwards have finished.
        at_loss = kept + self.chunks * (output + max(output, loss.peak_bytes if loss else 0))
        return max(at_loss, peak + self.chunks * output)
