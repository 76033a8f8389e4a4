"""The words of a schedule: what a stage does to a micro-batch, and what that needs."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["forward", "recompute", "backward", "backward_input", "backward_weight"]

LETTERS: dict[Kind, str] = {
    "forward": "F",
    "recompute": "R",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
}


class Action(NamedTuple):
    """One thing a stage does to one micro-batch."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.microbatch}"


class Step(NamedTuple):
    """An action together with the stage that does it."""

    stage: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action}@{self.stage}"


Program = tuple[Action, ...]
Walk = tuple[tuple[Step, ...], ...]
"""For each worker, its steps in order."""


def requirement(step: Step) -> tuple[Step, ...]:
    """The steps of another stage one of which makes what this one consumes, if there is such a stage."""
    stage, (kind, i) = step
    if kind == "forward":
        return (Step(stage - 1, Action("forward", i)),)
    if kind in ("backward", "backward_input"):
        return Step(stage + 1, Action("backward", i)), Step(stage + 1, Action("backward_input", i))
    return ()
