"""What a :class:`gpipe.Plan` is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .._gpipe import GPipe
from ._bytes import DeviceBytes
from ._loss import StepLoss


@dataclass(frozen=True)
class LayerKey:
    """What identifies a layer, to check that a model is the planned one."""

    name: str
    kind: str
    parameters: int

    def __str__(self) -> str:
        return f"{self.name!r} ({self.kind}, {self.parameters} parameters)"


def layer_keys(layers: Iterable[tuple[str, nn.Module]]) -> tuple[LayerKey, ...]:
    return tuple(
        LayerKey(name, type(layer).__name__, sum(parameter.numel() for parameter in layer.parameters()))
        for name, layer in layers
    )


@dataclass(frozen=True)
class Expected:
    """Seconds of a step of training, without the optimizer's.

    Attributes:
        low, mid, high: ``mid`` is the prediction; a step on an idle machine is expected between ``low`` and ``high``.
            After a calibration these are the fastest and the slowest measured step, with 5 % added on each side.
    """

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a step.

    Attributes:
        seconds: the seconds of a step.
        bytes: for each device the bytes at its peak, by kind.
        throughput: rows per second.
        bubble: the share of the devices' time in which they are idle.
    """

    seconds: Expected
    bytes: tuple[DeviceBytes, ...]
    throughput: float
    bubble: float


@dataclass(frozen=True)
class Alternative:
    """A configuration that was considered and not chosen.

    Attributes:
        chunks, schedule, balance, checkpoint: the configuration, as in :class:`gpipe.Plan`.
        seconds: the predicted seconds of a step.
        bytes: the bytes of the device that would hold the most.
        reason: why it was not chosen, as text.
    """

    chunks: int
    schedule: str
    balance: tuple[int, ...]
    checkpoint: tuple[str, ...]
    seconds: float
    bytes: int
    reason: str


@dataclass
class Remembered:
    """What a plan knows in this process only: the last pipe that it built, its loss and its sample."""

    pipe: Callable[[], GPipe | None] = lambda: None
    loss: StepLoss = field(default_factory=StepLoss)
    sample: Any = None
