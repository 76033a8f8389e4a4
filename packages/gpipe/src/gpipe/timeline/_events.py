"""One action of a run and its times, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import Action, Kind, Step


@dataclass(frozen=True)
class Event:
    """One action of a stage on a micro-batch, or on all of them.

    Attributes:
        stage, microbatch, kind: the action; the loss of the whole mini-batch has micro-batch 0.
        device: the device of the stage, as text.
        start, end: in seconds from the start of the run.
        wait: the seconds that the worker was idle before, waiting for a link.
        bytes_moved: the bytes that were copied from another device for it.
        layers: the names of the stage's first and last layer, as text.
        held_bytes: the bytes of activations that the stage keeps when the action ends; None if unknown.
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
        object.__setattr__(self, "kind", Kind(self.kind))  # a name is converted to a member

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __str__(self) -> str:
        return str(Step(self.stage, self.action))

    @property
    def action(self) -> Action:
        return Action(self.kind, self.microbatch)
