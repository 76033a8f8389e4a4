"""The begin of a run: the rank of the first stage tells the others what they need to know; all compare arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..schedule import Choice
from ..timeline._chooser import StepPlan
from ..timeline._record import Recorder


class Rows(NamedTuple):
    """A micro-batch whose values are on another rank.

    Attributes:
        rows: the number of rows of each tensor.
    """

    rows: tuple[int, ...]


class Opening:
    """What ranks know of a run before it begins.

    Attributes:
        alike: values that must be equal on all ranks, by names that a user knows.
        batches: the micro-batches; on ranks without the first stage, their numbers of rows.
        seed: the seed of the random numbers of the run.
        plan: the schedule of a step, and what goes with it.
        is_chosen: whether ranks have to report which stages are trained, because the next plan depends on it.
        first: ``alike`` on the rank of the first stage.
    """

    def __init__(self) -> None:
        self.alike: dict[str, Any] = {}
        self.batches: list[Any] = []
        self.seed = 0
        self.plan: StepPlan | None = None
        self.is_chosen = False
        self.first: dict[str, Any] = {}

    @property
    def differs(self) -> bool:
        """Whether this rank was given other values than the rank of the first stage."""
        return self.first != self.alike

    def told(self) -> dict[str, Any]:
        """What the rank of the first stage tells the others."""
        self.first = self.alike
        rows = [Rows(tuple(batch.rows)) for batch in self.batches]
        # A schedule that the caller has passed is known to every rank.
        choice = None if self.plan is None or not isinstance(self.plan.schedule, Choice) else self.plan.schedule
        watched = self.plan is not None and self.plan.recorder is not None
        return {"first": self.alike, "batches": rows, "seed": self.seed, "choice": choice, "watched": watched}

    def hear(self, told: dict[str, Any]) -> None:
        """Take in what the rank of the first stage has told."""
        self.first, self.batches, self.seed = told["first"], told["batches"], told["seed"]
        if told["choice"] is not None:
            self.plan = StepPlan(told["choice"], Recorder(memory=False) if told["watched"] else None)
