"""Memory estimate: the micro-batches that a stage holds at once, times the bytes of its layers.

It is used to compare candidates. It ignores details of the engine, such as shared memory and the time at which a
gradient is released. :mod:`gpipe._plan._dry_run` runs the chosen plan to count these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from operator import add
from typing import NamedTuple

from profiler import LayerProfile

from ..schedule import Kind, checkpoint_stops
from ..schedule._actions import TRIPS
from ..schedule._named import lanes
from ..schedule._offloads import with_offloads
from ..schedule._replay import Lane, steps_of_lanes
from ..timeline._costs import count_freed_bytes
from ._arguments import OFFLOAD, WAITING


@dataclass(frozen=True)
class DeviceBytes:
    """The peak bytes of a device, by kind.

    Attributes:
        parameters: parameters and buffers.
        gradients: gradients of the trainable parameters.
        optimizer: the state of the optimizer.
        activations: tensors saved by the other micro-batches in flight, or their inputs if they are checkpointed.
        transient: saved and temporary tensors of the micro-batch in its backward, and the device's copy of the
            mini-batch, if any.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient

    def __add__(self, other: DeviceBytes) -> DeviceBytes:
        """Return an upper bound for two stages on a device, whose peaks may occur at different times."""
        return DeviceBytes(*map(add, astuple(self), astuple(other)))

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes by kind."""
        return asdict(self)


class InFlight(NamedTuple):
    """The numbers of micro-batches that a stage holds at once, including the one that it computes.

    Attributes:
        full: micro-batches that hold all their saved tensors.
        awaiting_weights: the part of ``full`` that waits for the backward of the weights.
        inputs_only: micro-batches that hold only their inputs, or whose saved tensors are on the host.
    """

    full: int
    awaiting_weights: int
    inputs_only: int

    def covers(self, other: InFlight) -> bool:
        """Return whether this holds at least as much as ``other``. A ``full`` micro-batch includes its input."""
        return (
            self.full >= other.full
            and self.awaiting_weights >= other.awaiting_weights
            and self.full + self.inputs_only >= other.full + other.inputs_only
        )


@lru_cache(maxsize=4096)
def in_flight_peaks(
    schedule: str, mode: str, microbatches: int, placement: tuple[int, ...], stage: int, splits: bool
) -> list[InFlight]:
    """Return the peak states of a stage: at any other time, it holds no more of any kind than in one of these.

    >>> in_flight_peaks("1f1b", "never", 8, (0, 1, 2, 3), 1, False)
    [InFlight(full=3, awaiting_weights=0, inputs_only=0)]
    >>> in_flight_peaks("1f1b", "except_last", 8, (0, 1, 2, 3), 1, False)
    [InFlight(full=2, awaiting_weights=0, inputs_only=1)]
    >>> in_flight_peaks("fill_drain", "offload", 8, (0, 1, 2, 3), 1, False)
    [InFlight(full=2, awaiting_weights=0, inputs_only=6)]
    """
    # With more micro-batches, only schedules that begin with all forwards hold more.
    m = microbatches if schedule in WAITING else min(microbatches, 3 * len(placement))
    stop = checkpoint_stops(mode, m, 1)[0]
    lane = lanes(schedule, m, placement, stop, [stage] if splits else [])[placement[stage]]
    if mode == OFFLOAD:
        (lane,) = with_offloads(steps_of_lanes([lane]), [stage])
    return in_flight_peaks_in(lane, stage, stop)


def in_flight_peaks_in(lane: Lane, stage: int, stop: int) -> list[InFlight]:
    """Return the peak states of a stage, as :func:`in_flight_peaks`, in the steps of its worker.

    Micro-batches below ``stop`` are checkpointed.
    """
    full, awaiting_weights, inputs_only, leaving = set[int](), set[int](), set[int](), set[int]()
    found = set[InFlight]()
    for j, (kind, i) in lane:
        if j != stage:
            continue
        if kind in TRIPS:
            leaving.clear()  # the memory of the previous one is free
        if kind is Kind.OFFLOAD:
            full.discard(i)
            leaving.add(i)
            inputs_only.add(i)
            continue
        for held in (full, awaiting_weights, inputs_only):
            held.discard(i)
        most = 1 + len(full) + len(awaiting_weights) + len(leaving)
        found.add(InFlight(most, len(awaiting_weights), len(inputs_only - leaving)))
        if kind is not Kind.BACKWARD and kind is not Kind.BACKWARD_WEIGHT:
            is_checkpointed = kind is Kind.FORWARD and i < stop
            (inputs_only if is_checkpointed else awaiting_weights if kind is Kind.BACKWARD_INPUT else full).add(i)
    return sorted(each for each in found if not any(other != each and other.covers(each) for other in found))


class StageBytes(NamedTuple):
    """The bytes of a stage.

    Attributes:
        parameters, gradients, optimizer: the bytes of its layers by kind.
        kept: the bytes that a micro-batch saves for its backward.
        waiting: additional bytes that it holds between the two parts of a split backward.
        bare: the bytes that it holds if it is checkpointed.
        near: the bytes that it holds if its saved tensors are on the host.
        transient: the peak bytes of a micro-batch in an action, including its saved tensors.
    """

    parameters: int
    gradients: int
    optimizer: int
    kept: int
    waiting: int
    bare: int
    near: int
    transient: int

    @property
    def far(self) -> int:
        """The bytes of a micro-batch that move to the host."""
        return self.kept - self.near

    def at_peak(self, moments: Iterable[InFlight], mode: str) -> DeviceBytes:
        """Return the bytes in the largest of these states."""
        bare = self.near if mode == OFFLOAD else self.bare
        most = max((n.full - 1) * self.kept + n.awaiting_weights * self.waiting + n.inputs_only * bare for n in moments)
        return DeviceBytes(self.parameters, self.gradients, self.optimizer, most, self.transient)


def compute_kept_and_peak(layers: Sequence[LayerProfile], loss: LayerProfile | None) -> tuple[int, int]:
    """Return the bytes that a micro-batch saves in its forward, and its peak bytes."""
    kept = most = 0
    for layer, lost in zip(layers, count_freed_bytes(layers), strict=True):
        most = max(most, kept + _peak(layer))
        kept += layer.saved_bytes - lost
    return kept + (loss.saved_bytes if loss else 0), max(most, kept + (loss.peak_bytes if loss else 0))


def _peak(layer: LayerProfile) -> int:
    """Return the peak bytes of a layer without gradients of parameters.

    The largest of these gradients is included, since it exists twice while it is accumulated.
    """
    computed = max(layer.saved_bytes + layer.output_bytes, layer.peak_bytes - layer.trainable_bytes)
    return computed + layer.largest_parameter_bytes
