"""Actions: what a stage does with a micro-batch, and which other actions have to come before."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """What an action does. A member equals its name in lower case, as in ``Kind.FORWARD == "forward"``."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    LOSS = "loss"

    # Enum would use the hash of the member's name; a dict would then not find "forward".
    __hash__ = str.__hash__
    __str__ = str.__str__

    @property
    def letter(self) -> str:
        """The letter of the action in the text of a schedule."""
        return _LETTERS[self]

    @property
    def label(self) -> str:
        """The name of the action in tables and pictures."""
        return self.replace("_", " ")


_LETTERS = dict(zip(Kind, "FRBIWC", strict=True))


class Action(NamedTuple):
    """One action of a stage on one micro-batch; :data:`LOSS_OF_ALL` is one on all of them."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        letter = Kind(self.kind).letter
        return letter if self.kind == Kind.LOSS else f"{letter}{self.microbatch}"


LOSS_OF_ALL = Action(Kind.LOSS, 0)
"""The loss of the whole mini-batch (C, the criterion): the last stage computes it between forwards and backwards."""


class Step(NamedTuple):
    """An action together with the stage that does it."""

    stage: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action}@{self.stage}"


Program = tuple[Action, ...]
"""The actions of a stage, in order."""

Walk = tuple[tuple[Step, ...], ...]
"""For each worker, its steps in order."""


def requirement(step: Step) -> tuple[Step, ...]:
    """The steps of a neighbouring stage on which this one depends; it needs one of them.

    Args:
        step: an action of a stage.

    Returns:
        An empty tuple, or one or two steps; if two, a schedule contains one of them.
    """
    stage, (kind, i) = step
    if kind == Kind.FORWARD:
        return (Step(stage - 1, Action(Kind.FORWARD, i)),)
    if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        return Step(stage + 1, Action(Kind.BACKWARD, i)), Step(stage + 1, Action(Kind.BACKWARD_INPUT, i))
    return ()


def deadlock(waiting: Iterable[Step]) -> ValueError:
    told = (f"{step} for {' or '.join(map(str, requirement(step)))}" for step in waiting)
    return ValueError(f"the workers wait for each other forever: {', '.join(told)}")
