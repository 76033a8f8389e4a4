"""How far blocks reach on a stage that pays for the cut behind them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from ._measure import Measure, Ranking, rank


@dataclass(frozen=True)
class Paid:
    """What the costs of cuts do to the ends within reach, for one measure of work and one speed.

    peaks: for each end the most that this end or one before it asks for: its cut, and the work up to it if they add up.
    lows: for each end the least that this end or one behind it asks for.
    singles: what a block of each layer alone asks for.
    """

    overlap: bool
    prefix: list[int]
    peaks: list[int]
    lows: list[int]
    singles: Ranking

    def sure_end(self, start: int, limit: int) -> int:
        """An end up to which the cut is within the limit at every position, if the work is."""
        return bisect_right(self.peaks, limit if self.overlap else self.prefix[start] + limit) - 1

    def least_beyond(self, start: int, end: int) -> int:
        """No block from this start that ends behind this end asks for less."""
        return self.lows[end + 1] - self.prefix[start]


def read_paid(work: Measure, extra: list[int], overlap: bool) -> Paid:
    """`extra` is the cost of a cut at each position, as work."""
    prefix = work.prefix
    if overlap:
        singles = [max(work.of(i, i + 1), extra[i + 1]) for i in range(len(prefix) - 1)]
        return Paid(True, prefix, list(accumulate(extra, max)), prefix, rank(singles))
    ends = [total + cut for total, cut in zip(prefix, extra, strict=True)]
    singles = [end - total for total, end in zip(prefix, ends[1:], strict=False)]
    return Paid(False, prefix, list(accumulate(ends, max)), list(accumulate(reversed(ends), min))[::-1], rank(singles))
