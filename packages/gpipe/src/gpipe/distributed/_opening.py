"""The begin of a run: the rank of the first stage tells the others what they need to know, and all compare."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..schedule import Choice
from ..timeline._chooser import Plan
from ..timeline._record import Recorder


class Rows(NamedTuple):
    """A micro-batch on another rank.

    Attributes:
        rows: how many it has, by tensor.
    """

    rows: tuple[int, ...]


class Opening:
    """What is known of a run before it begins.

    Attributes:
        alike: what all ranks must say alike, by names that a user knows.
        batches: the micro-batches; where the first stage is elsewhere, how many rows they have.
        seed: of its random numbers.
        plan: how a step is to run.
        is_chosen: whether ranks have to tell how their stages stand, because the next plan depends on that.
        first: what the rank of the first stage says of ``alike``.
    """

    def __init__(self) -> None:
        self.alike: dict[str, Any] = {}
        self.batches: list[Any] = []
        self.seed = 0
        self.plan: Plan | None = None
        self.is_chosen = False
        self.first: dict[str, Any] = {}

    @property
    def differs(self) -> bool:
        """Whether this rank was given something else than that one."""
        return self.first != self.alike

    def told(self) -> dict[str, Any]:
        """What the rank of the first stage tells the others, as JSON can write it."""
        self.first = self.alike
        rows = [batch.rows for batch in self.batches]
        return {"alike": self.alike, "rows": rows, "seed": self.seed, "plan": _written(self.plan)}

    def hear(self, told: dict[str, Any]) -> None:
        """What it has told."""
        self.first = told["alike"]
        self.batches = [Rows(tuple(rows)) for rows in told["rows"]]
        self.seed = told["seed"]
        if told["plan"] is not None:
            name, split, seconds, watched = told["plan"]
            self.plan = Plan(Choice(name, tuple(split), seconds), Recorder(memory=False) if watched else None)


def _written(plan: Plan | None) -> list[Any] | None:
    """What others cannot know of a plan: all but a schedule of the caller's own."""
    if plan is None or not isinstance(plan.schedule, Choice):
        return None
    choice = plan.schedule
    return [choice.name, choice.split, dict(choice.seconds), plan.recorder is not None]
