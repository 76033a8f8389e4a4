"""A quantity that layers add up to, such as seconds or bytes, and how far a limit on it reaches."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Measure:
    """`prefix[p]` is the sum of all layers before position p.

    entry: what a block needs on top if it starts at a position; None if nothing. A shorter block may then need more.
    """

    prefix: list[int]
    entry: list[int] | None = None

    def of(self, start: int, end: int) -> int:
        """The sum of a block."""
        total = self.prefix[end] - self.prefix[start]
        return total + self.entry[start] if self.entry else total

    def last_end(self, start: int, limit: int) -> int:
        """The furthest end of a block from `start` within the limit; `start` itself where not one layer fits.

        At most this, where there is an entry.
        """
        return bisect_right(self.prefix, self.prefix[start] + limit, start) - 1

    def first_start(self, end: int, limit: int) -> int:
        """The furthest start of a block up to `end` within the limit; beyond `end` where the limit is negative.

        At least this, where there is an entry.
        """
        return bisect_left(self.prefix, self.prefix[end] - limit)

    def heavier(self, limit: int) -> list[int]:
        """The layers that no block within the limit can have, in order of weight."""
        return self._ranking.above(limit)

    @cached_property
    def lightest(self) -> list[int]:
        """For each layer the least that a block with it can come to: with an entry, a longer one may come to less."""
        if self.entry is None:
            return [after - before for before, after in pairwise(self.prefix)]
        best = accumulate((total - held for total, held in zip(self.prefix, self.entry, strict=True)), max)
        return [total - most for most, total in zip(best, self.prefix[1:], strict=False)]

    @cached_property
    def _ranking(self) -> Ranking:
        return rank(self.lightest)


@dataclass(frozen=True)
class Ranking:
    """Layers in order of weight."""

    weights: list[int]
    layers: list[int]

    def above(self, limit: int) -> list[int]:
        """Those that weigh more."""
        return self.layers[bisect_right(self.weights, limit) :]


def rank(weights: list[int]) -> Ranking:
    """The layers with these weights."""
    layers = sorted(range(len(weights)), key=weights.__getitem__)
    return Ranking([weights[i] for i in layers], layers)


def measure_at(positions: list[int], units: list[int]) -> Measure:
    """The sums of the layers' units at these positions only."""
    sums = list(accumulate(units, initial=0))
    return Measure([sums[p] for p in positions])
