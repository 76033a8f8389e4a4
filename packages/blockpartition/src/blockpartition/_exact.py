"""The least possible bottleneck, by a search between what fits and what provably does not.

Pınar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning" (2004), after Nicol (1994).
Everything here is in integers: `prefix[i]` is the sum of the first i costs.
"""

from __future__ import annotations

from bisect import bisect_left
from math import isqrt
from operator import mul, sub

from ._fill import fill
from ._guesses import Guesses

_SAMPLE = 2**12  # layers, at most; the first guess need not be better


def least_bottleneck(units: list[int], prefix: list[int], blocks: int) -> tuple[int, list[int]]:
    """The smallest bound under which `blocks` blocks hold everything, and the heights of their ends filled up to it.

    Both ends of the search are sums that occur: a success lowers the upper end to the largest block it made, a failure
    raises the lower end to the smallest sum that would have changed it. So the search ends on the optimum, exactly.
    """
    total, heaviest = prefix[-1], max(units)
    low, high = max(-(-total // blocks), heaviest), total
    highest, lost = [total] * blocks, _lost(units)
    bound, guesses = max(low, total // blocks + lost), Guesses(blocks, isqrt(blocks) * lost, high - low)
    while low < high:
        bound = min(max(bound, low), high - 1)
        heights, above = fill(prefix, bound, blocks)
        if heights[-1] == total:
            over = _over(heights, bound)
            highest, high = heights, _largest(heights)
        else:
            over, low = heights[-1] - total, above
        bound = guesses.next(bound, over, low, high)
    return high, highest


def _lost(units: list[int]) -> int:
    """What a block lacks of its bound, on average, where layers come in no order: half a layer, drawn by its cost."""
    sample = units[:: max(8, len(units) // _SAMPLE)]
    squares: int = sum(map(mul, sample, sample))
    return squares // (2 * sum(sample) or 1)


def _over(heights: list[int], bound: int) -> int:
    """How much more blocks that reached the end could have held, without what is lost between the layers."""
    last = bisect_left(heights, heights[-1])
    return (len(heights) - last) * bound - heights[-1] + (heights[last - 1] if last else 0)


def _largest(heights: list[int]) -> int:
    """The sum of the largest block."""
    largest: int = max(map(sub, heights, [0, *heights]))
    return largest
