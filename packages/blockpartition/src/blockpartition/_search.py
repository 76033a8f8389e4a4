"""Find the minimum bottleneck by closing the gap between a feasible and an infeasible bound.

Source: Pınar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning" (2004), after Nicol (1994).
Heights are prefix sums: the sums of all costs before an end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import sub

_SHORT = 16  # layers per block up to which a scan is as fast as a bisection


def least_bottleneck(prefix: list[int], heaviest: int, blocks: int) -> int:
    """Return the smallest bound under which `blocks` blocks cover all layers.

    A success lowers the upper bound to its largest block, and a failure raises the lower bound to the smallest block
    sum that would have changed the blocks. Both are sums of layers, so the search ends at the exact optimum.
    """
    total = prefix[-1]
    low, high = max(-(-total // blocks), heaviest), min(total, total // blocks + heaviest)
    # In random order, a block falls short of the bound by about half a layer, weighted by its cost.
    bound = max(low, total // blocks + heaviest // 3)
    while low < high:
        heights, next_sum = fill_from_left(prefix, bound, blocks)
        if len(heights) <= blocks and heights[-1] == total:
            starts = [0, *heights]
            high = max(map(sub, heights, starts))
            spare = (blocks - len(heights) + 1) * bound - (total - starts[-2])
        else:
            low, spare = next_sum, heights[blocks - 1] - total
        # Divide the surplus or deficit among the blocks, but move by at least a quarter, which bounds the passes.
        guess, quarter = bound - spare // blocks, (high - low) // 4
        bound = min(max(guess, low + quarter), high - 1 - quarter)
    return high


def fill_from_left(prefix: list[int], bound: int, blocks: int) -> tuple[list[int], int]:
    """Fill blocks up to the bound from the left, and return the heights of their ends. No layer may exceed the bound.

    The last height is the total only if the blocks cover all layers. The second result is the smallest bound that would
    change the blocks.
    """
    return (_by_scan if len(prefix) <= _SHORT * blocks else _by_bisection)(prefix, bound, blocks)


def _by_scan(prefix: list[int], bound: int, blocks: int) -> tuple[list[int], int]:
    heights, before, limit, over = [], 0, bound, prefix[-1] + 1
    # The loop visits every layer, so it calls no functions except when a block ends.
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
    """Fill blocks up to the bound from the right, and return the heights of their starts and of the last end."""
    heights, start = [prefix[-1]], len(prefix) - 1
    for _ in range(blocks):
        start = bisect_left(prefix, prefix[start] - bound, 0, start)
        heights.append(prefix[start])
    return heights[::-1]


def witness(prefix: list[int], bottleneck: int, blocks: int) -> tuple[int, ...]:
    """Return the ends g₁ … g_k of greedy blocks that stay strictly below the bottleneck.

    If every load is below the bottleneck, block j ends at g_j at the latest. So g_k < n proves that k such blocks
    cannot cover all n layers.
    """
    ends, end = list[int](), 0
    for _ in range(blocks):
        end = max(end, bisect_left(prefix, prefix[end] + bottleneck, end) - 1)
        ends.append(end)
    return tuple(ends)
