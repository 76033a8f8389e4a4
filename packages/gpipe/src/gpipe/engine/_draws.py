"""Which layers draw random numbers, as far as runs have shown."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from ..checkpoint._random import CellRNG

_RUNS = 16
"""In how many runs at most somebody is looked for who drew unseen, and perhaps does not in every run."""


class Draws:
    """What is known about the draws of a stage, or of a loss.

    Micro-batches may differ, so that one that draws nothing says nothing about the others: until a whole run was
    watched, everyone may draw. Those that did once may do it again.

    Args:
        everyone: the layers of the stage by number, and ``OUTSIDE``.

    Attributes:
        everyone: the same.
        drawing: those whose draws the next forward should follow.
    """

    def __init__(self, everyone: frozenset[int]) -> None:
        self.everyone = everyone
        self._drew: dict[Hashable, frozenset[int]] = {}
        self._known: dict[Hashable, frozenset[int]] = {}
        self._asks: dict[Hashable, bool] = {}
        self._left = 0
        self._then: dict[Hashable, frozenset[int]] = {}
        self.begin(None)

    def begin(self, condition: Hashable) -> None:
        """A run begins. Of what was learned, that holds which was learned under the same ``condition``."""
        self._condition = condition
        self.drawing = self._known.get(condition, self.everyone)
        self._watched = True
        self._heard = False

    @contextmanager
    def learning(self, random: CellRNG) -> Iterator[None]:
        """Around a forward: it has these random numbers, and shows who draws."""
        try:
            with random.drawn_from(served=self._asks.get(self._condition, True)):
                yield
        finally:
            self._heard |= random.served
            if random.asked:
                self._asks[self._condition] = True
        drew = random.drew
        if random.asked and random.drew_on_device:
            # An accelerator's generator needs no watching, unless layers put states back that are not the cell's.
            drew = drew | random.asked | random.drew_on_device
        if drew:
            self._drew[self._condition] = self._drew.get(self._condition, frozenset()) | drew

    def saw_all(self, always: Callable[[], frozenset[int]] = frozenset) -> None:
        """All forwards of a run are done. Who drew in none of them, and is not in ``always()``, is left alone."""
        if not self._watched:
            return
        if self._condition not in self._known:
            if not self._found():
                return
            self._known[self._condition] = self._drew.get(self._condition, frozenset()) | always()
        if self._heard:
            self._asks.setdefault(self._condition, False)

    def _found(self) -> bool:
        """Whether it is known who drew unseen, if anybody did, or is given up: nobody new has drawn in many runs."""
        self._left -= 1
        return self._left < 0 or self._drew != self._then

    def forget(self) -> None:
        """Somebody drew unseen: look again, from the next forward to the end of a run in which somebody new is seen."""
        self._watched = False
        self._left = _RUNS
        self._then = dict(self._drew)
        self._known.clear()
        self._asks.clear()
        self.drawing = self.everyone
