"""A quantity that layers add up to, such as seconds or bytes, and how far a limit on it reaches."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Measure:
    """`prefix[p]` is the sum of all layers before position p."""

    prefix: list[int]

    def of(self, start: int, end: int) -> int:
        """The sum of a block."""
        return self.prefix[end] - self.prefix[start]

    def last_end(self, start: int, limit: int) -> int:
        """The furthest end of a block from `start` within the limit; `start` itself where not one layer fits."""
        return bisect_right(self.prefix, self.prefix[start] + limit, start) - 1

    def first_start(self, end: int, limit: int) -> int:
        """The furthest start of a block up to `end` within the limit; beyond `end` where the limit is negative."""
        return bisect_left(self.prefix, self.prefix[end] - limit)

    def heavier(self, limit: int) -> list[int]:
        """The layers that exceed the limit by themselves, in order of weight."""
        weights, layers = self._ranking
        return layers[bisect_right(weights, limit) :]

    @cached_property
    def _ranking(self) -> tuple[list[int], list[int]]:
        weights = [after - before for before, after in pairwise(self.prefix)]
        layers = sorted(range(len(weights)), key=weights.__getitem__)
        return [weights[i] for i in layers], layers


def measure_at(positions: list[int], units: list[int]) -> Measure:
    """The sums of the layers' units at these positions only."""
    sums = list(accumulate(units, initial=0))
    return Measure([sums[p] for p in positions])
