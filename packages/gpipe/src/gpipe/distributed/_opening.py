"""The begin of a run: the rank of the first stage tells the others what they need to know; all compare arguments."""

from __future__ import annotations

from typing import Any, NamedTuple


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
        first: ``alike`` on the rank of the first stage.
    """

    def __init__(self) -> None:
        self.alike: dict[str, Any] = {}
        self.batches: list[Any] = []
        self.seed = 0
        self.first: dict[str, Any] = {}

    @property
    def differs(self) -> bool:
        """Whether this rank was given other values than the rank of the first stage."""
        return self.first != self.alike

    def told(self) -> dict[str, Any]:
        """What the rank of the first stage tells the others."""
        self.first = self.alike
        rows = [Rows(tuple(batch.rows)) for batch in self.batches]
        return {"first": self.alike, "batches": rows, "seed": self.seed}

    def hear(self, told: dict[str, Any]) -> None:
        """Take in what the rank of the first stage has told."""
        self.first, self.batches, self.seed = told["first"], told["batches"], told["seed"]
