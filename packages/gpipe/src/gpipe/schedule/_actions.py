"""Actions: what a stage does with a micro-batch, and which other actions it depends on."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """The kind of an action. A member equals its name in lower case, as in ``Kind.FORWARD == "forward"``."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    LOSS = "loss"
    LOAD = "load"
    UNLOAD = "unload"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"

    # Enum would hash the member's name, so a dict with members as keys would not find "forward".
    __hash__ = str.__hash__
    __str__ = str.__str__

    @property
    def letter(self) -> str:
        """The letter that stands for the action in the text of a schedule."""
        return _LETTERS[self]

    @property
    def label(self) -> str:
        """The name of the action in tables and pictures."""
        return self.replace("_", " ")


_LETTERS = dict(zip(Kind, "FRBIWCLUOP", strict=True))


MOVES = (Kind.LOAD, Kind.UNLOAD)
"""The kinds of actions that move the parameters of a stage, beside the computations of its worker."""

TRIPS = (Kind.OFFLOAD, Kind.PREFETCH)
"""The kinds of actions that move the saved tensors of a cell to the host and back, beside these computations."""

TRANSFERS = (*MOVES, *TRIPS)
"""The kinds of actions that compute nothing."""


class Action(NamedTuple):
    """An action of a stage on one micro-batch, or on all of them if it is :data:`LOSS_OF_ALL`.

    For a load or unload of the stage's parameters, ``microbatch`` counts the loads of the stage, from 0.
    """

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        letter = Kind(self.kind).letter
        return letter if self.kind == Kind.LOSS else f"{letter}{self.microbatch}"


LOSS_OF_ALL = Action(Kind.LOSS, 0)
"""The loss of the full mini-batch (C, the criterion). The last stage computes it between forwards and backwards."""


class Step(NamedTuple):
    """An action together with the stage that performs it."""

    stage: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action}@{self.stage}"


Program = tuple[Action, ...]
"""The actions of a stage, in order."""

WorkerSteps = tuple[tuple[Step, ...], ...]
"""The steps of each worker, in order."""


def dependencies_of(step: Step) -> tuple[Step, ...]:
    """Return the steps of a neighboring stage that ``step`` depends on; one of them is enough.

    Args:
        step: an action of a stage.

    Returns:
        Up to two steps. If there are two, a schedule contains only one of them.
    """
    stage, (kind, i) = step
    if kind == Kind.FORWARD:
        return (Step(stage - 1, Action(Kind.FORWARD, i)),)
    if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        return Step(stage + 1, Action(Kind.BACKWARD, i)), Step(stage + 1, Action(Kind.BACKWARD_INPUT, i))
    return ()


def deadlock(waiting: Iterable[Step]) -> ValueError:
    waits = (f"{step} for {' or '.join(map(str, dependencies_of(step)))}" for step in waiting)
    return ValueError(f"the workers wait for each other forever: {', '.join(waits)}")
