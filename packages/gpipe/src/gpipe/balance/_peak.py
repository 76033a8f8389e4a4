"""The balance with the smallest peak memory of any stage under a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from blockpartition import Infeasible, Mode, Stage, place
from profiler import Profile

from ..schedule import in_flight, named
from ..timeline._kept import shares
from ._cuts import Cuts

# What a stage keeps of its micro-batches. If it recomputes, all activations of one of them at a time.
_KEEPS = Mode("keep", boundary=0)
_RECOMPUTES = Mode("recompute", saved=0, transient=1)
MODES = {"never": _KEEPS, "except_last": _RECOMPUTES, "always": _RECOMPUTES}


def held_at_once(schedule: str, chunks: int, partitions: int) -> list[int]:
    """The largest number of micro-batches that each stage holds at a time."""
    return [in_flight(program) for program in named(schedule, chunks, tuple(range(partitions)))]


class LayerBytes(NamedTuple):
    """The bytes of each layer.

    Attributes:
        memory: bytes that do not depend on the number of micro-batches.
        activations: saved bytes of a micro-batch, for the backward.
        boundary: bytes of the input of a micro-batch.
    """

    memory: Sequence[float]
    activations: Sequence[float]
    boundary: Sequence[float]


def bytes_of(profile: Profile, param_scale: float) -> LayerBytes:
    """The bytes of layers on a micro-batch, with those of the loss in the last layer, and parameters times
    ``param_scale``.
    """
    memory = [round(param_scale * layer.parameter_bytes) for layer in profile]
    memory[-1] += profile.loss.peak_bytes if profile.loss else 0
    boundary = [0, *(layer.output_bytes for layer in profile.layers[:-1])]  # the caller has the input in any case
    return LayerBytes(memory, shares(profile.layers), boundary)


def least_peak(layers: LayerBytes, held: Sequence[int], mode: Mode, cuts: Cuts) -> list[int]:
    """The balance with the smallest peak: that of a placement with the least capacity that is feasible.

    Args:
        layers: the bytes of each layer.
        held: the number of micro-batches that each stage holds.
        mode: what a stage keeps of its micro-batches.
        cuts: positions at which partitions have to begin, and may not begin.
    """
    memory, activations, boundary = layers
    free = partial(place, [0] * len(memory), memory=memory, activations=activations, boundary=boundary,
                   in_flight=held, pin=cuts.pin, forbid=cuts.forbid)  # fmt: skip

    def placed(capacity: int) -> list[int] | None:
        try:
            return list(free([Stage(capacity=capacity, modes=[mode])] * len(held)).sizes)
        except Infeasible:
            return None

    least, enough = 0, round(sum(memory) + (max(held) + 1) * (sum(activations) + sum(boundary)))
    while least < enough:
        middle = (least + enough) // 2
        if placed(middle) is None:
            least = middle + 1
        else:
            enough = middle
    sizes = placed(least)
    assert sizes is not None
    return sizes
