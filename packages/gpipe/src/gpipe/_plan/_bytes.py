"""Memory estimate: the micro-batches that a stage holds at once, times the bytes of its layers.

It is used to compare candidates. It ignores details of the engine, such as shared memory and the time at which a
gradient is released. :mod:`gpipe._plan._rehearse` runs the chosen plan to count these.
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
from ..schedule._replay import Lane, walk_of
from ..timeline._costs import freed
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


class Held(NamedTuple):
    """The numbers of micro-batches that a stage holds at once, including the one that it computes.

    Attributes:
        whole: micro-batches that hold all their saved tensors.
        late: the part of ``whole`` that waits for the backward of the weights.
        bare: micro-batches that hold only their inputs, or whose saved tensors are on the host.
    """

    whole: int
    late: int
    bare: int

    def covers(self, other: Held) -> bool:
        """Return whether this holds at least as much as ``other``. A ``whole`` micro-batch includes its input."""
        return (
            self.whole >= other.whole and self.late >= other.late and self.whole + self.bare >= other.whole + other.bare
        )


@lru_cache(maxsize=4096)
def held(
    schedule: str, mode: str, microbatches: int, placement: tuple[int, ...], stage: int, splits: bool
) -> list[Held]:
    """Return the peak states of a stage: at any other time, it holds no more of any kind than in one of these.

    >>> held("1f1b", "never", 8, (0, 1, 2, 3), 1, False)
    [Held(whole=3, late=0, bare=0)]
    >>> held("1f1b", "except_last", 8, (0, 1, 2, 3), 1, False)
    [Held(whole=2, late=0, bare=1)]
    >>> held("fill_drain", "offload", 8, (0, 1, 2, 3), 1, False)
    [Held(whole=2, late=0, bare=6)]
    """
    # With more micro-batches, only schedules that begin with all forwards hold more.
    m = microbatches if schedule in WAITING else min(microbatches, 3 * len(placement))
    stop = checkpoint_stops(mode, m, 1)[0]
    lane = lanes(schedule, m, placement, stop, [stage] if splits else [])[placement[stage]]
    if mode == OFFLOAD:
        (lane,) = with_offloads(walk_of([lane]), [stage])
    return held_in(lane, stage, stop)


def held_in(lane: Lane, stage: int, stop: int) -> list[Held]:
    """Return the peak states of a stage, as :func:`held`, in the steps of its worker.

    Micro-batches below ``stop`` are checkpointed.
    """
    whole, late, bare, leaving = set[int](), set[int](), set[int](), set[int]()
    found = set[Held]()
    for j, (kind, i) in lane:
        if j != stage:
            continue
        if kind in TRIPS:
            leaving.clear()  # the memory of the previous one is free
        if kind is Kind.OFFLOAD:
            whole.discard(i)
            leaving.add(i)
            bare.add(i)
            continue
        for some in (whole, late, bare):
            some.discard(i)
        found.add(Held(1 + len(whole) + len(late) + len(leaving), len(late), len(bare - leaving)))
        if kind is not Kind.BACKWARD and kind is not Kind.BACKWARD_WEIGHT:
            (bare if kind is Kind.FORWARD and i < stop else late if kind is Kind.BACKWARD_INPUT else whole).add(i)
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

    def at_peak(self, moments: Iterable[Held], mode: str) -> DeviceBytes:
        """Return the bytes in the largest of these states."""
        bare = self.near if mode == OFFLOAD else self.bare
        most = max((n.whole - 1) * self.kept + n.late * self.waiting + n.bare * bare for n in moments)
        return DeviceBytes(self.parameters, self.gradients, self.optimizer, most, self.transient)


def kept_and_peak(layers: Sequence[LayerProfile], loss: LayerProfile | None) -> tuple[int, int]:
    """Return the bytes that a micro-batch saves in its forward, and its peak bytes."""
    kept = most = 0
    for layer, lost in zip(layers, freed(layers), strict=True):
        most = max(most, kept + _peak(layer))
        kept += layer.saved_bytes - lost
    return kept + (loss.saved_bytes if loss else 0), max(most, kept + (loss.peak_bytes if loss else 0))


def _peak(layer: LayerProfile) -> int:
    """Return the peak bytes of a layer without gradients of parameters.

    The largest of these gradients is included, since it exists twice while it is accumulated.
    """
    computed = max(layer.saved_bytes + layer.output_bytes, layer.peak_bytes - layer.trainable_bytes)
    return computed + layer.largest_parameter_bytes
