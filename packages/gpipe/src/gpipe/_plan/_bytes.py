"""The account of bytes: how many micro-batches a stage holds at once, times the bytes of its layers.

It tells ways to train from each other. It leaves out what only the engine knows: which memory is shared, when a
gradient is dropped. :mod:`gpipe._plan._rehearse` runs the chosen plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from profiler import LayerProfile

from ..schedule._flags import runs_of
from ..timeline._kept import freed


@dataclass(frozen=True)
class DeviceBytes:
    """The bytes of a device at its peak, by kind.

    Attributes:
        parameters: parameters and buffers.
        gradients: gradients of the trainable parameters.
        optimizer: the state of the optimizer.
        activations: of the other micro-batches in flight: all that they save, or their inputs if they are checkpointed.
        transient: the micro-batch that is in its backward: what it saved, and temporary memory; and the mini-batch
            where it was moved to the device.
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


def held(schedule: str, mode: str, microbatches: int, stages: int, stage: int, split: bool) -> list[Held]:
    """What a stage holds at its fullest moments.

    Args:
        schedule: its name.
        mode: how the stage is checkpointed.
        microbatches, stages: how many there are.
        stage: its number.
        split: whether its backward is.

    >>> held("1f1b", "never", 8, 4, 1, False), held("1f1b", "except_last", 8, 4, 1, False)
    ([Held(whole=3, late=0, bare=0)], [Held(whole=1, late=0, bare=2), Held(whole=2, late=0, bare=1)])
    """
    drains = schedule == "fill_drain"
    # A split backward of stage j leaves j micro-batches to be finished while it waits for gradients.
    late = stage if split else 0
    several = min(microbatches, microbatches if drains else stages - stage + late)
    late = min(late, several - 1)
    if mode == "never":
        return [Held(several, late, 0)]
    found = [Held(1 + late, late, several - 1 - late)]
    if mode == "except_last" and not drains and found[0].bare:
        found.append(Held(2 + late, late, several - 2 - late))  # the last one, beside the one that is recomputed
    return found


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


def kept_and_peak(layers: Sequence[LayerProfile], flags: Sequence[bool], loss: LayerProfile | None) -> tuple[int, int]:
    """What a micro-batch keeps after its forward, and the most that it takes in forward and backward.

    Args:
        layers: of a stage.
        flags: of layers, whether its backward computes them again.
        loss: of the loss behind the stage, if it is the last one.
    """
    kept = most = 0
    for again, first, end in runs_of(flags):
        own, graph = layers[first:end], kept
        for layer, lost in zip(own, freed(own), strict=True):
            most = max(most, graph + _peak(layer))
            graph += layer.saved_bytes - lost
        # Of layers that are computed again, only the output of the last one is kept.
        kept = kept + own[-1].output_bytes if again else graph
    return kept, max(most, kept + (loss.peak_bytes if loss else 0))


def _peak(layer: LayerProfile) -> int:
    """Without the gradients of parameters, except one that is added to that of an earlier micro-batch."""
    computed = max(layer.saved_bytes + layer.output_bytes, layer.peak_bytes - layer.trainable_bytes)
    return computed + layer.largest_parameter_bytes
