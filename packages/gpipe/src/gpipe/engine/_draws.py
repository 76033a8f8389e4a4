"""Which layers draw random numbers, as far as runs have shown.

Watching a layer costs time at each of its operations. So all layers are watched in the first run in each training mode,
and afterwards only those that have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from ..checkpoint._random import CellRNG

Layers = frozenset[int]
"""Indices of layers of a stage; ``OUTSIDE`` stands for draws outside of any layer."""

_RUNS = 16
"""After a draw that was not watched, all layers are watched again for at most so many runs."""


class DrawFacts(NamedTuple):
    """What runs have shown under one condition: the training modes of the layers, or the kind of a loss.

    Attributes:
        drew: the layers that were seen to draw.
        known: the layers to watch, once all have been watched for a whole run.
        asks: whether layers read or set torch's generator.
        searches: the number of runs in which all layers are still watched, to find the one that drew unwatched.
        before: the value of ``drew`` when the search began.
    """

    drew: Mapping[Hashable, Layers] = {}
    known: Mapping[Hashable, Layers] = {}
    asks: Mapping[Hashable, bool] = {}
    searches: int = 0
    before: Mapping[Hashable, Layers] = {}


class Draws:
    """Says which layers to watch in a run, and learns from the run which ones draw.

    Micro-batches may differ: a layer that draws nothing for one may draw for the next. So every layer is watched until
    a whole run has been seen, and a layer that drew once is always watched.

    Args:
        everyone: all layers of the stage.
        facts: what runs before have shown.

    Attributes:
        everyone: the same.
        facts: the same, and what this run has shown.
        drawing: the layers to watch in the next forward.
        settled: whether this run can show nothing more, unless draws are forgotten.
    """

    def __init__(self, everyone: Layers, facts: DrawFacts | None = None) -> None:
        self.everyone = everyone
        self.facts = facts or DrawFacts()

    def begin(self, condition: Hashable) -> None:
        """Start a run. Only what was learned under the same ``condition`` applies to it."""
        self._condition = condition
        self.drawing = self.facts.known.get(condition, self.everyone)
        self.settled = condition in self.facts.known and condition in self.facts.asks
        self._followed_all = True
        self._served = False

    @contextmanager
    def learning(self, random: CellRNG) -> Iterator[None]:
        """A context for a forward whose layers draw from ``random``; learns from it which layers drew."""
        try:
            asks = self.facts.asks.get(self._condition, True)
            with random.drawn_from(served=asks, known=self._condition in self.facts.known):
                yield
        finally:
            self._served |= random.served
            if random.asked:
                self._learn(asks={**self.facts.asks, self._condition: True})
        drew = random.drew
        if random.asked and random.drew_on_device:
            # The state of an accelerator's generator is put back for a recomputation, so its draws need no watching,
            # unless a layer sets that state itself.
            drew = drew | random.asked | random.drew_on_device
        if not drew <= self._drew:
            self._learn(drew={**self.facts.drew, self._condition: self._drew | drew})

    def saw_all(self, always: Callable[[], Layers] = frozenset) -> None:
        """All forwards of a run are done: stop watching layers that never drew, other than those in ``always()``."""
        if not self._followed_all:
            return
        if self._condition not in self.facts.known:
            if not self._ends_search():
                return
            self._learn(known={**self.facts.known, self._condition: self._drew | always()})
        if self._served and self._condition not in self.facts.asks:
            self._learn(asks={**self.facts.asks, self._condition: False})

    def forget(self) -> None:
        """A draw was not watched: watch all layers, until a run shows another layer that draws."""
        self.settled = self._followed_all = False
        self._learn(searches=_RUNS, before=self.facts.drew, known={}, asks={})
        self.drawing = self.everyone

    @property
    def _drew(self) -> Layers:
        return self.facts.drew.get(self._condition, frozenset())

    def _ends_search(self) -> bool:
        """Whether the search is over: there was none, it found another layer, or it took too many runs."""
        self._learn(searches=self.facts.searches - 1)
        return self.facts.searches < 0 or self.facts.drew != self.facts.before

    def _learn(self, **changes: object) -> None:
        self.facts = self.facts._replace(**changes)  # type: ignore[arg-type]
