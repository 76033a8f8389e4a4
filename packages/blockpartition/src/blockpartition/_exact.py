"""The least possible bottleneck, by a search between what fits and what provably does not.

Pınar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning" (2004), after Nicol (1994).
Bounds are ints, in units of the sums.
"""

from __future__ import annotations

from math import isqrt
from operator import mul
from typing import Any

from ._fill import scan
from ._guesses import Guesses
from ._refill import Fills
from ._sums import Sums

_SAMPLE = 2**11  # layers, at most; the first guess need not be better
_CHUNKS = 16  # parts in a row of as many layers, where blocks are so short that what they lack depends on the bound
_SHORT = 16  # layers of a block
_MARGIN = 256  # of what a block lacks: the first bound had better be enough, since only then blocks are filled again
_SLACK = 32  # about twice as many blocks for one that may change with the bounds to come


def least_bottleneck(sums: Sums, blocks: int) -> tuple[int, list[Any]]:
    """The smallest bound under which `blocks` blocks hold everything, and the heights of their ends filled up to it.

    Both ends of the search are sums that occur: a success lowers the upper end to the largest block it made, a failure
    raises the lower end to the smallest sum that would have changed it. So the search ends on the optimum, exactly.
    """
    total = sums.total
    low, high = max(-(-total // blocks), sums.heaviest), total
    highest, lost = [sums.prefix[-1]] * blocks, _lost(sums)
    fills = Fills(sums, blocks, lost // _SLACK)
    bound, guesses = _first(sums, blocks, low, lost), Guesses(blocks, max(1, isqrt(blocks) * lost), high - low)
    while low < high:
        bound = min(max(bound, low), high - 1)
        found = fills.fill(bound)
        if found.complete:
            highest, high = found.heights, found.limit
        else:
            low = found.limit
        bound = guesses.next(bound, _over(sums, found.heights, blocks), low, high)
    return high, highest + [sums.prefix[-1]] * (blocks - len(highest))


def _first(sums: Sums, blocks: int, low: int, lost: int) -> int:
    """A bound to begin with, which is about the least."""
    mean = sums.total // blocks
    bound = max(low, mean + lost)
    if sums.layers > _SHORT * blocks or sums.layers < 2 * _CHUNKS * _SAMPLE:
        return bound
    starts = range(0, sums.layers - _SAMPLE, sums.layers // _CHUNKS)
    chunks = [sums.prefix[start : start + _SAMPLE] for start in starts]
    for _ in range(3):
        bound = max(low, mean + bound - _filled(sums, chunks, bound))
    return bound + lost // _MARGIN


def _filled(sums: Sums, chunks: list[list[Any]], bound: int) -> int:
    """The mean sum of blocks filled up to the bound, in these chunks of the sums."""
    ends = [scan(chunk, bound * sums.unit)[0] for chunk in chunks]
    held = sum(heights[-1] - chunk[0] for chunk, heights in zip(chunks, ends, strict=True) if heights)
    return sums.length(held) // (sum(map(len, ends)) or 1)


def _lost(sums: Sums) -> int:
    """What a block lacks of its bound, on average, where layers come in no order: half a layer, drawn by its cost."""
    prefix, unit, step = sums.prefix, sums.unit, max(8, sums.layers // _SAMPLE)
    sample = [(prefix[i + 1] - prefix[i]) // unit for i in range(0, sums.layers, step)]
    return int(sum(map(mul, sample, sample)) // (2 * sum(sample) or 1))


def _over(sums: Sums, heights: list[Any], blocks: int) -> int:
    """What is left over, negative if something is left out: blocks that are empty would hold as much as others do."""
    left_out = heights[-1] - sums.prefix[-1]
    if left_out < 0:
        return sums.length(left_out)
    full, start = len(heights) - 1, (heights[-2:-1] or sums.prefix)[0]
    mean = sums.units(start) // max(1, full)
    return max(0, (blocks - full) * mean - sums.length(heights[-1] - start))
