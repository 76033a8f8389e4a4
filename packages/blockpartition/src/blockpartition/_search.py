"""The least possible bottleneck, by a search between what fits and what provably does not.

Pınar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning" (2004), after Nicol (1994). Heights are
elements of the prefix sums: sums of all costs before an end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import sub

_SHORT = 16  # layers of a block; a bisection takes about as long as a look at so many


def least_bottleneck(prefix: list[int], heaviest: int, blocks: int) -> int:
    """The smallest bound under which `blocks` blocks hold everything.

    Both ends of the search are sums that occur: a success lowers the upper end to the largest block it made, a failure
    raises the lower end to the smallest sum that would have changed it. So the search ends on the optimum.
    """
    total = prefix[-1]
    low, high = max(-(-total // blocks), heaviest), min(total, total // blocks + heaviest)
    # Where layers come in no order, a block lacks half a layer, drawn by its cost.
    bound = max(low, total // blocks + heaviest // 3)
    while low < high:
        heights, next_sum = fill_from_left(prefix, bound, blocks)
        if len(heights) <= blocks and heights[-1] == total:
            starts = [0, *heights]
            high = max(map(sub, heights, starts))
            spare = (blocks - len(heights) + 1) * bound - (total - starts[-2])
        else:
            low, spare = next_sum, heights[blocks - 1] - total
        # What is over or lacks, shared among the blocks; but a quarter at least, so that passes are few for all costs.
        guess, quarter = bound - spare // blocks, (high - low) // 4
        bound = min(max(guess, low + quarter), high - 1 - quarter)
    return high


def fill_from_left(prefix: list[int], bound: int, blocks: int) -> tuple[list[int], int]:
    """Heights of the ends of blocks filled up to the bound from the left; no layer may exceed it.

    The last height is the total only if the blocks hold everything. Also the least sum above the bound: with any bound
    below it the blocks would be the same.
    """
    return (_by_scan if len(prefix) <= _SHORT * blocks else _by_bisection)(prefix, bound, blocks)


def _by_scan(prefix: list[int], bound: int, blocks: int) -> tuple[list[int], int]:
    heights, before, limit, over = [], 0, bound, prefix[-1] + 1
    # One look at every layer, so nothing is called inside.
    for height in prefix:
        if height > limit:
            heights.append(before)
            if height - limit < over:
                over = height - limit
            limit = before + bound
        before = height
    return [*heights, before], bound + over


def _by_bisection(prefix: list[int], bound: int, blocks: int) -> tuple[list[int], int]:
    heights, start, end, over, size = list[int](), 0, 0, prefix[-1] + 1, len(prefix)
    while end < size and len(heights) < blocks:
        end = bisect_right(prefix, start + bound, end)
        if end < size and prefix[end] - start < over:
            over = prefix[end] - start
        start = prefix[end - 1]
        heights.append(start)
    return heights, over


def fill_from_right(prefix: list[int], bound: int, blocks: int) -> list[int]:
    """Heights, in order, of the starts of blocks filled up to the bound from the right, and of the last end."""
    heights, start = [prefix[-1]], len(prefix) - 1
    for _ in range(blocks):
        start = bisect_left(prefix, prefix[start] - bound, 0, start)
        heights.append(prefix[start])
    return heights[::-1]


def witness(prefix: list[int], bottleneck: int, blocks: int) -> tuple[int, ...]:
    """Ends g₁ … g_k of greedy blocks that stay strictly below the bottleneck.

    If every load is below the bottleneck, the j-th block ends at g_j at the latest. So g_k < n proves that such blocks
    cannot cover all n layers.
    """
    ends, end = list[int](), 0
    for _ in range(blocks):
        end = max(end, bisect_left(prefix, prefix[end] + bottleneck, end) - 1)
        ends.append(end)
    return tuple(ends)
