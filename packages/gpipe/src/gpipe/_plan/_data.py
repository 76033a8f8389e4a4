"""The data of a plan; :class:`gpipe.Plan` adds methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .._gpipe import GPipe
from ..schedule._flags import StageMode, as_lists
from ..timeline import StageCost, Timeline, simulate
from ._bytes import DeviceBytes
from ._candidate import schedule_of
from ._fleet import FAKE


@dataclass(frozen=True)
class LayerKey:
    """What identifies a layer, to check that a model is the planned one."""

    name: str
    kind: str
    parameters: int

    def __str__(self) -> str:
        return f"{self.name!r} ({self.kind}, {self.parameters} parameters)"


def layer_keys(model: nn.Sequential) -> tuple[LayerKey, ...]:
    """The keys of the layers of ``model``."""
    return tuple(
        LayerKey(name, type(layer).__name__, sum(parameter.numel() for parameter in layer.parameters()))
        for name, layer in model.named_children()
    )


@dataclass(frozen=True)
class Expected:
    """Seconds of a step of training, without the optimizer's.

    Attributes:
        low, mid, high: ``mid`` is the prediction; a step on an idle machine is expected between ``low`` and ``high``.
            After a calibration these are the fastest and the slowest step that was measured, with 5 % added on each
            side.
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
    checkpoint: tuple[StageMode, ...]
    seconds: float
    bytes: int
    reason: str


@dataclass
class Remembered:
    """What a plan knows in this process only, and what is not in its file.

    Attributes:
        pipe: the last that was built, while it is alive.
        loss_fn: of the plan.
        sample: of the plan.
    """

    pipe: Callable[[], GPipe | None] = lambda: None
    loss_fn: Callable[[Any, Any], Any] | None = None
    sample: Any = None


@dataclass(frozen=True)
class PlanData:
    """The fields of :class:`gpipe.Plan`, where they are described, and what follows from them."""

    layers: tuple[LayerKey, ...]
    devices: tuple[str, ...]
    memory: tuple[int | None, ...]
    rows: int
    sizes: tuple[int, ...]
    chunks: int
    schedule: str
    modes: tuple[StageMode, ...]
    split: tuple[int, ...]
    predicted: Prediction
    stages: tuple[StageCost, ...]
    hops: tuple[float, ...]
    replicas: int
    reduction: float
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    _here: Remembered = field(default_factory=Remembered, compare=False, repr=False)

    @property
    def balance(self) -> list[int]:
        """The number of layers of each stage."""
        return list(self.sizes)

    @property
    def checkpoint(self) -> list[str | list[bool]]:
        """For each stage its checkpoint mode, or a list with a flag for each of its layers."""
        return as_lists(self.modes)

    @property
    def is_estimate(self) -> bool:
        """Whether this machine does not have the devices, so that nothing was measured."""
        return self.devices[0].startswith(FAKE)

    @property
    def timeline(self) -> Timeline:
        """The predicted timeline of a step."""
        schedule = schedule_of(self.schedule, self.chunks, self.modes, self.split)
        return simulate(schedule, self.stages, transfer=self.hops[1:])
