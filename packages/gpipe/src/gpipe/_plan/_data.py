"""The data types that make up a :class:`gpipe.Plan`."""

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
    """The identity of a layer, used to check that a model is the planned one."""

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
    """The expected seconds of a training step, without the optimizer step.

    Attributes:
        low, mid, high: ``mid`` is the prediction. A step on an idle machine should take between ``low`` and ``high``.
            After calibration, these two are the fastest and the slowest measured step, widened by 5 % on each side.
    """

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a step.

    Attributes:
        seconds: the seconds of a step.
        bytes: the peak bytes of each device, by kind.
        throughput: rows per second.
        bubble: the share of time in which the devices are idle.
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
        bytes: the predicted bytes of the device with the highest peak.
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
    """Data that a plan has only in this process: the last pipe that it built, its loss and its sample."""

    pipe: Callable[[], GPipe | None] = lambda: None
    loss: StepLoss = field(default_factory=StepLoss)
    sample: Any = None
