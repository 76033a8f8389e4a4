"""The least possible bottleneck, by a search between what fits and what provably does not.

Pınar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning" (2004), after Nicol (1994).
Bounds are ints, in units of the sums.
"""

from __future__ import annotations

from bisect import bisect_left
from math import isqrt
from operator import mul
from typing import Any

from ._guesses import Guesses
from ._refill import Fills
from ._sums import Sums

_SAMPLE = 2**11  # layers, at most; the first guess need not be better


def least_bottleneck(sums: Sums, blocks: int) -> tuple[int, list[Any]]:
    """The smallest bound under which `blocks` blocks hold everything, and the heights of their ends filled up to it.

    Both ends of the search are sums that occur: a success lowers the upper end to the largest block it made, a failure
    raises the lower end to the smallest sum that would have changed it. So the search ends on the optimum, exactly.
    """
    total = sums.total
    low, high = max(-(-total // blocks), sums.heaviest), total
    highest, lost = [sums.prefix[-1]] * blocks, _lost(sums)
    fills = Fills(sums, blocks)
    bound, guesses = max(low, total // blocks + lost), Guesses(blocks, isqrt(blocks) * lost, high - low)
    while low < high:
        bound = min(max(bound, low), high - 1)
        found = fills.fill(bound)
        if found.complete:
            highest, high = found.heights, found.limit
        else:
            low = found.limit
        bound = guesses.next(bound, _over(sums, found.heights, bound), low, high)
    return high, highest


def _lost(sums: Sums) -> int:
    """What a block lacks of its bound, on average, where layers come in no order: half a layer, drawn by its cost."""
    prefix, unit, step = sums.prefix, sums.unit, max(8, sums.layers // _SAMPLE)
    sample = [(prefix[i + 1] - prefix[i]) // unit for i in range(0, sums.layers, step)]
    return int(sum(map(mul, sample, sample)) // (2 * sum(sample) or 1))


def _over(sums: Sums, heights: list[Any], bound: int) -> int:
    """What is left over, negative if something is left out; without what is lost between the layers."""
    end = heights[-1]
    if end < sums.prefix[-1]:
        return sums.length(end - sums.prefix[-1])
    last = bisect_left(heights, end)
    return (len(heights) - last) * bound - sums.length(end - (heights[last - 1] if last else sums.prefix[0]))
