"""The cost of a stage on a micro-batch, specified directly or computed from a profile of its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from profiler import LayerProfile, Profile

from ..schedule import Kind
from ..schedule._actions import TRANSFERS


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage on one micro-batch.

    Attributes:
        forward, backward, recompute: seconds; by default a recomputation takes as long as the forward.
        backward_input, backward_weight: the seconds of the two parts of a split backward. If one part is None, it is
            the remainder of the backward; if both are None, each is half of it.
        loss: the seconds of the loss of the full mini-batch, on the last stage, if the schedule has it; 0 by default.
        load: the seconds in which the stage's parameters are copied from the host, if they are offloaded; 0 by default.
        unload: the seconds in which their gradients are copied to the host; 0 by default.
        offload, prefetch: the seconds in which the saved tensors of a micro-batch are copied to the host, and back; 0
            by default. They are ``activation_bytes - boundary_bytes``, because a stage keeps its input.
        activation_bytes: bytes of activations that the stage saves for the backward.
        boundary_bytes: bytes of the stage's input, and of the input's gradient, which cross the link from the previous
            stage. A checkpointed micro-batch keeps only the input until its recomputation.
        layers: the names of the layers, as text.

    Raises ValueError if a value is negative or not finite.

    >>> StageCost(forward=1, backward=3, backward_input=1).seconds("backward_weight")
    2
    """

    forward: float
    backward: float
    recompute: float | None = None
    backward_input: float | None = None
    backward_weight: float | None = None
    loss: float | None = None
    load: float | None = None
    unload: float | None = None
    offload: float | None = None
    prefetch: float | None = None
    activation_bytes: int = 0
    boundary_bytes: int = 0
    layers: str = ""

    def __post_init__(self) -> None:
        bytes_of = {name: getattr(self, name) for name in ("activation_bytes", "boundary_bytes")}
        for name, value in ({kind.value: self.seconds(kind) for kind in Kind} | bytes_of).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected a finite, non-negative number, got {value!r}")

    def seconds(self, kind: Kind) -> float:
        """Return the duration of an action.

        Args:
            kind: the kind of the action.

        Returns:
            The duration in seconds.
        """
        given: float | None = getattr(self, kind)
        if given is not None:
            return given
        if kind == Kind.RECOMPUTE:
            return self.forward
        if kind in (Kind.LOSS, *TRANSFERS):
            return 0.0
        other = self.backward_weight if kind == Kind.BACKWARD_INPUT else self.backward_input
        return self.backward / 2 if other is None else self.backward - other


def stage_costs(profile: Profile, balance: Sequence[int], *, input_bytes: int = 0) -> list[StageCost]:
    """Compute the cost of each stage from a profile of the layers.

    Args:
        profile: a profile of the model on a micro-batch. If it has no seconds, because the model is on ``meta``, a
            forward of each stage counts as one second and a backward as two.
        balance: the number of layers of each stage.
        input_bytes: bytes of a micro-batch's input, which the first stage keeps if it is checkpointed.

    Returns:
        A cost per stage. On CUDA it includes the stage's copy of its input; on a CPU the input is the previous stage's
        output, and counts there.

    Raises:
        ValueError: ``balance`` has numbers below 1, or does not sum to the number of layers.
    """
    if sum(balance) != len(profile) or min(balance, default=1) < 1:
        raise ValueError(f"balance: expected positive numbers that sum to {len(profile)} layers, got {list(balance)}")
    timed = all(layer.seconds is not None for layer in profile.layers)
    costs = list[StageCost]()
    for first, end in pairwise(accumulate(balance, initial=0)):
        layers = profile.layers[first:end]
        boundary = profile.layers[first - 1].output_bytes if first else input_bytes
        # On the CPU the input is the previous stage's output, and counts there.
        copied = boundary if first and profile.device.startswith("cuda") else 0
        # A tensor that two layers hold counts once.
        kept = sum(layer.saved_bytes for layer in layers) - sum(count_freed_bytes(layers))
        costs.append(
            StageCost(
                forward=sum(layer.forward_seconds or 0.0 for layer in layers) if timed else 1.0,
                backward=sum(layer.backward_seconds or 0.0 for layer in layers) if timed else 2.0,
                activation_bytes=kept + copied,
                boundary_bytes=boundary,
                layers=", ".join(layer.name for layer in layers),
            )
        )
    return costs


def count_freed_bytes(layers: Sequence[LayerProfile]) -> list[int]:
    """Return how many bytes, allocated by previous layers, each layer frees."""
    found, loose = [], 0
    for layer in layers:
        found.append(min(layer.freed_bytes, loose))
        loose = min(layer.passing_bytes, layer.saved_bytes + loose - found[-1])
    return found
