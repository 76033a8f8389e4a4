"""An action of a run and its times, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import Action, Kind, Step
from ..schedule._actions import TRANSFERS


@dataclass(frozen=True)
class Event:
    """An action of a stage on one micro-batch, or on all of them.

    Attributes:
        stage, microbatch, kind: the action; the loss of the full mini-batch has micro-batch 0, and
            loads of a stage are counted instead.
        device: the device of the stage, as text.
        start, end: seconds from a common origin of the timeline.
        wait: the seconds that the worker waited for the action's input.
        bytes_moved: the bytes that were copied from a different device for the action.
        layers: the names of the stage's layers, as text.
        held_bytes: the bytes of activations that the stage holds when the action ends; None if unknown.
    """

    stage: int
    microbatch: int
    kind: Kind
    device: str
    start: float
    end: float
    wait: float = 0.0
    bytes_moved: int = 0
    layers: str = ""
    held_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))  # names such as "forward" are accepted

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __str__(self) -> str:
        return str(Step(self.stage, self.action))

    @property
    def moves(self) -> bool:
        """Whether the action copies tensors from or to the host, beside the computations of its worker."""
        return self.kind in TRANSFERS

    @property
    def action(self) -> Action:
        return Action(self.kind, self.microbatch)
