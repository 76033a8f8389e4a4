"""What a plan says, as plain data; :class:`gpipe.Plan` adds what can be done with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .._gpipe import GPipe
from ..schedule._flags import StageMode, as_lists
from ..timeline import StageCost, Timeline, simulate
from ._candidate import Candidate, Space, schedule_of
from ._fake import FAKE
from ._memory import DeviceBytes


@dataclass(frozen=True)
class LayerKey:
    """What tells whether a model is the one that was planned for."""

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
        low, mid, high: ``mid`` is the prediction; a step on a quiet machine is expected between the others. After a
            calibration those are the quickest and the slowest step that was tried, and 5 %.
    """

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to take.

    Attributes:
        seconds: of a step.
        bytes: what each device holds at its fullest moment, by what it is for.
        throughput: rows in a second.
        bubble: the share of the devices' time in which they do nothing.
    """

    seconds: Expected
    bytes: tuple[DeviceBytes, ...]
    throughput: float
    bubble: float


@dataclass(frozen=True)
class Alternative:
    """A way to train that was looked at and not taken.

    Attributes:
        chunks, schedule, balance, checkpoint: what it was.
        seconds: of a step.
        bytes: of the device that would hold the most.
        reason: why it was not taken.
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
        space: what was searched.
        chosen: what was found there.
    """

    pipe: Callable[[], GPipe | None] = lambda: None
    loss_fn: Callable[[Any, Any], Any] | None = None
    sample: Any = None
    space: Space | None = None
    chosen: Candidate | None = None


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
    ranks: tuple[int, ...]
    reduction: float
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    _here: Remembered = field(default_factory=Remembered, compare=False, repr=False)

    @property
    def balance(self) -> list[int]:
        """How many layers each stage gets."""
        return list(self.sizes)

    @property
    def checkpoint(self) -> list[str | list[bool]]:
        """The mode of checkpointing of each stage, or for each of its layers whether it is computed again."""
        return as_lists(self.modes)

    @property
    def is_estimate(self) -> bool:
        """Whether the devices are not there, so that nothing was measured."""
        return self.devices[0].startswith(FAKE)

    @property
    def timeline(self) -> Timeline:
        """When which stage does what in a step, as predicted."""
        schedule = schedule_of(self.schedule, self.chunks, self.modes, self.split)
        return simulate(schedule, self.stages, transfer=self.hops[1:])
