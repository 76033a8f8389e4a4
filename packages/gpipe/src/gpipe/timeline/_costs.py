"""The cost of a stage on a micro-batch, given or computed from a profile of its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

from profiler import LayerProfile, Profile

from ..schedule import Kind
from ._kept import kept_bytes


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage on one micro-batch.

    Attributes:
        forward, backward, recompute: seconds; by default a recomputation takes as long as the forward.
        backward_input, backward_weight: the seconds of the two parts of a split backward. If one is not given, it is
            the rest of the backward; if neither is given, each is half of it.
        activation_bytes: bytes that the stage keeps for the backward.
        boundary_bytes: bytes of the stage's input, and of its gradient, which are sent over the link before the stage.
            A checkpointed micro-batch keeps only these until its recomputation.
        layers: the names of the layers, as text.
        timed: whether times are in seconds. If nothing was measured they are in ticks, and only bytes are known.

    >>> StageCost(forward=1, backward=3, backward_input=1).seconds("backward_weight")
    2
    """

    forward: float
    backward: float
    recompute: float | None = None
    backward_input: float | None = None
    backward_weight: float | None = None
    activation_bytes: int = 0
    boundary_bytes: int = 0
    layers: str = ""
    timed: bool = True

    def __post_init__(self) -> None:
        for each in fields(self)[:-2]:
            value = getattr(self, each.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{each.name}: expected a number that is not negative, got {value!r}")
        for part in (self.backward_input, self.backward_weight):
            if None in (self.backward_input, self.backward_weight) and part is not None and part > self.backward:
                raise ValueError(
                    f"backward: {self.backward!r} seconds are less than the {part!r} of one of its parts; give both"
                )

    def seconds(self, kind: Kind) -> float:
        """The time of an action.

        Args:
            kind: the kind of the action.

        Returns:
            Seconds, or ticks.
        """
        if kind == Kind.RECOMPUTE:
            return self.forward if self.recompute is None else self.recompute
        if kind == Kind.BACKWARD_INPUT:
            return self._part(self.backward_input, self.backward_weight)
        if kind == Kind.BACKWARD_WEIGHT:
            return self._part(self.backward_weight, self.backward_input)
        return self.forward if kind == Kind.FORWARD else self.backward

    def _part(self, own: float | None, other: float | None) -> float:
        if own is not None:
            return own
        return self.backward / 2 if other is None else self.backward - other


def stage_costs(
    profile: Profile, balance: Sequence[int], chunks: int | None = None, *, input_bytes: int = 0
) -> list[StageCost]:
    """The cost of each stage, from a profile of the layers.

    Args:
        profile: a profile of the model on a micro-batch.
        balance: the number of layers of each stage.
        chunks: the number of micro-batches of the mini-batch. If the profile has another number, seconds and bytes are
            scaled in proportion.
        input_bytes: bytes of a micro-batch's input, which the first stage keeps if it is checkpointed.

    A profile without seconds, such as that of a model on ``meta``, has only bytes. Each stage then takes one tick for a
    forward and two for a backward, and timelines show ticks. The peak of a stage depends only on the order of actions.

    On CUDA a stage keeps a copy of its input too; on a CPU the input is the output that the stage before keeps.

    Returns:
        A cost for each stage.

    Raises:
        ValueError: ``balance`` does not fit, or ``chunks`` is below 1.
    """
    if sum(balance) != len(profile) or min(balance, default=1) < 1:
        raise ValueError(
            f"balance: expected positive numbers that sum up to {len(profile)} layers, got {list(balance)}"
        )
    if chunks is not None and chunks < 1:
        raise ValueError(f"chunks: expected a positive number of micro-batches, got {chunks}")
    scale = 1.0 if chunks is None else profile.chunks / chunks
    stages = [profile.layers[first:end] for first, end in pairwise(accumulate(balance, initial=0))]
    inputs = [input_bytes, *(round(layers[-1].output_bytes * scale) for layers in stages[:-1])]
    # Elsewhere the input is the output that the stage before keeps, and counts there.
    copied = profile.device.startswith("cuda")
    return [
        _stage_cost(layers, scale, boundary, boundary if copied and j else 0)
        for j, (layers, boundary) in enumerate(zip(stages, inputs, strict=True))
    ]


def _stage_cost(layers: Sequence[LayerProfile], scale: float, boundary: int, copied: int) -> StageCost:
    timed = all(layer.seconds is not None for layer in layers)
    return StageCost(
        forward=scale * sum(layer.forward_seconds or 0.0 for layer in layers) if timed else 1.0,
        backward=scale * sum(layer.backward_seconds or 0.0 for layer in layers) if timed else 2.0,
        activation_bytes=round(scale * kept_bytes(layers)) + copied,
        boundary_bytes=boundary,
        layers=", ".join(layer.name for layer in layers),
        timed=timed,
    )
