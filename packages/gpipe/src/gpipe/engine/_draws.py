"""Which layers draw random numbers, as far as runs have shown.

Following what a layer draws costs time at each of its operations. So in the first run in each training mode all layers
are followed, and from then on only those that drew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from ..checkpoint._random import CellRNG

Layers = frozenset[int]
"""Layers of a stage by number, and ``OUTSIDE``."""

_RUNS = 16
"""In how many runs at most all layers are followed again, after numbers were drawn that nobody had followed."""


class DrawFacts(NamedTuple):
    """What runs have shown. Each mapping is by condition: the training modes of the layers, or the kind of a loss.

    Attributes:
        drew: the layers that were seen to draw.
        known: the layers to follow, where all have been followed for a whole run.
        asks: whether layers read or set torch's generator.
        searches: in how many more runs to look for a layer that drew without being followed.
        before: what ``drew`` was when the search began.
    """

    drew: Mapping[Hashable, Layers] = {}
    known: Mapping[Hashable, Layers] = {}
    asks: Mapping[Hashable, bool] = {}
    searches: int = 0
    before: Mapping[Hashable, Layers] = {}


class Draws:
    """Says in a run whose draws to follow, and learns from it who draws.

    Micro-batches may differ, so one that draws nothing says nothing about the others: until a whole run was followed,
    every layer may draw. A layer that drew once may do it again.

    Args:
        everyone: all layers that there are.
        facts: what runs before have shown.

    Attributes:
        everyone: the same.
        facts: the same, and what this run has shown.
        drawing: the layers whose draws the next forward should follow.
        settled: whether this run can show nothing more, unless draws are forgotten.
    """

    def __init__(self, everyone: Layers, facts: DrawFacts | None = None) -> None:
        self.everyone = everyone
        self.facts = facts or DrawFacts()

    def begin(self, condition: Hashable) -> None:
        """A run begins. Only what was learned under the same ``condition`` holds for it."""
        self._condition = condition
        self.drawing = self.facts.known.get(condition, self.everyone)
        self.settled = condition in self.facts.known and condition in self.facts.asks
        self._followed_all = True
        self._served = False

    @contextmanager
    def learning(self, random: CellRNG) -> Iterator[None]:
        """Around a forward: its layers draw from ``random``, which tells who drew."""
        try:
            with random.drawn_from(served=self.facts.asks.get(self._condition, True)):
                yield
        finally:
            self._served |= random.served
            if random.asked:
                self._learn(asks={**self.facts.asks, self._condition: True})
        drew = random.drew
        if random.asked and random.drew_on_device:
            # An accelerator's generator needs no watching, unless layers put states back that are not the cell's.
            drew = drew | random.asked | random.drew_on_device
        if not drew <= self._drew:
            self._learn(drew={**self.facts.drew, self._condition: self._drew | drew})

    def saw_all(self, always: Callable[[], Layers] = frozenset) -> None:
        """All forwards of a run are done: leave the layers alone that drew in none of them, except for ``always()``."""
        if not self._followed_all:
            return
        if self._condition not in self.facts.known:
            if not self._ends_search():
                return
            self._learn(known={**self.facts.known, self._condition: self._drew | always()})
        if self._served and self._condition not in self.facts.asks:
            self._learn(asks={**self.facts.asks, self._condition: False})

    def forget(self) -> None:
        """Numbers were drawn that nobody followed: follow all layers, until a run shows another one that draws."""
        self.settled = self._followed_all = False
        self._learn(searches=_RUNS, before=self.facts.drew, known={}, asks={})
        self.drawing = self.everyone

    @property
    def _drew(self) -> Layers:
        return self.facts.drew.get(self._condition, frozenset())

    def _ends_search(self) -> bool:
        """Whether it is known who draws: nobody is searched for, somebody new was found, or the search is given up."""
        self._learn(searches=self.facts.searches - 1)
        return self.facts.searches < 0 or self.facts.drew != self.facts.before

    def _learn(self, **changes: object) -> None:
        self.facts = self.facts._replace(**changes)  # type: ignore[arg-type]
