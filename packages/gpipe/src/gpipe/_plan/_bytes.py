"""The account of bytes: how many micro-batches a stage holds at once, times the bytes of its layers.

It compares ways to train. It leaves out what only the engine knows: which memory is shared, when a gradient is dropped.
:mod:`gpipe._plan._rehearse` runs the chosen plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import lru_cache
from operator import add
from typing import NamedTuple

from profiler import LayerProfile

from ..schedule import Kind, checkpoint_stops
from ..schedule._named import lanes
from ..timeline._costs import freed


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes of a device at its peak, by kind.

    Attributes:
        parameters: parameters and buffers.
        gradients: gradients of the trainable parameters.
        optimizer: the state of the optimizer.
        activations: of the other micro-batches in flight: all that they save, or their inputs if they are checkpointed.
        transient: the micro-batch in its backward, saved and temporary; and the mini-batch where it was moved there.
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
        """An upper bound for two stages on a device, whose peaks may come at different times."""
        return DeviceBytes(*map(add, astuple(self), astuple(other)))

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes by kind."""
        return asdict(self)


class Held(NamedTuple):
    """The micro-batches that a stage holds at once, with the one that it computes.

    Attributes:
        whole: those that hold all that they saved.
        late: of these, those that wait for the part of their backward for the weights.
        bare: those that hold their inputs only.
    """

    whole: int
    late: int
    bare: int

    def covers(self, other: Held) -> bool:
        """Whether this is at least as much; what is held as a whole holds its input too."""
        return (
            self.whole >= other.whole and self.late >= other.late and self.whole + self.bare >= other.whole + other.bare
        )


@lru_cache(maxsize=4096)
def held(
    schedule: str, mode: str, microbatches: int, placement: tuple[int, ...], stage: int, splits: bool
) -> list[Held]:
    """What a stage holds at its fullest moments: every other moment has at most as much of everything.

    >>> held("1f1b", "never", 8, (0, 1, 2, 3), 1, False)
    [Held(whole=3, late=0, bare=0)]
    >>> held("1f1b", "except_last", 8, (0, 1, 2, 3), 1, False)
    [Held(whole=2, late=0, bare=1)]
    """
    # In longer runs only fill-drain holds more.
    m = microbatches if schedule == "fill_drain" else min(microbatches, 3 * len(placement))
    stop = checkpoint_stops(mode, m, 1)[0]
    lane = lanes(schedule, m, placement, stop, [stage] if splits else [])[placement[stage]]
    whole, late, bare = set[int](), set[int](), set[int]()
    found = set[Held]()
    for j, (kind, i) in lane:
        if j != stage:
            continue
        for some in (whole, late, bare):
            some.discard(i)
        found.add(Held(1 + len(whole) + len(late), len(late), len(bare)))
        if kind is not Kind.BACKWARD and kind is not Kind.BACKWARD_WEIGHT:
            (bare if kind is Kind.FORWARD and i < stop else late if kind is Kind.BACKWARD_INPUT else whole).add(i)
    return sorted(each for each in found if not any(other != each and other.covers(each) for other in found))


class StageBytes(NamedTuple):
    """The bytes of a stage.

    Attributes:
        parameters, gradients, optimizer: those of its layers.
        kept: what a micro-batch keeps for its backward.
        waiting: what it keeps beside that between two parts of a backward.
        bare: what it keeps if it is checkpointed.
        transient: what the micro-batch of an action takes, with what it kept.
    """

    parameters: int
    gradients: int
    optimizer: int
    kept: int
    waiting: int
    bare: int
    transient: int

    def at_peak(self, moments: Iterable[Held]) -> DeviceBytes:
        """The bytes at the fullest of some moments."""
        most = max((n.whole - 1) * self.kept + n.late * self.waiting + n.bare * self.bare for n in moments)
        return DeviceBytes(self.parameters, self.gradients, self.optimizer, most, self.transient)


def kept_and_peak(layers: Sequence[LayerProfile], loss: LayerProfile | None) -> tuple[int, int]:
    """What a micro-batch keeps after its forward, and the most that it takes."""
    kept = most = 0
    for layer, lost in zip(layers, freed(layers), strict=True):
        most = max(most, kept + _peak(layer))
        kept += layer.saved_bytes - lost
    return kept, max(most, kept + (loss.peak_bytes if loss else 0))


def _peak(layer: LayerProfile) -> int:
    """Without the gradients of parameters, except one that is added to that of an earlier micro-batch."""
    computed = max(layer.saved_bytes + layer.output_bytes, layer.peak_bytes - layer.trainable_bytes)
    return computed + layer.largest_parameter_bytes
