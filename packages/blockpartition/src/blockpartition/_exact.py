"""The least possible bottleneck, by bisection between what fits and what provably does not.

Pınar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning" (2004), after Nicol (1994).
Everything here is in integers: `prefix[i]` is the sum of the first i costs.
"""

from __future__ import annotations

from bisect import bisect_right


def least_bottleneck(prefix: list[int], blocks: int) -> int:
    """The smallest bound under which `blocks` blocks hold everything.

    Both ends of the search are sums that occur: a success lowers the upper end to the largest block it made, a failure
    raises the lower end to the smallest sum that would have changed it. So the search ends on the optimum, exactly.
    """
    total, n = prefix[-1], len(prefix) - 1
    low, high = -(-total // blocks), total
    # Twice the mean always fits unless a layer is heavier than the mean; looking for one would cost a pass over all.
    bound = min(2 * low, total)
    # The j-th end of a greedy pass only grows with the bound: earlier passes fence in the later ones.
    earliest, latest = [0] * blocks, [n] * blocks
    while low < high:
        fits, occurring, ends = _probe(prefix, bound, earliest, latest)
        if fits:
            high, latest = occurring, ends
        else:
            low, earliest = occurring, ends
        bound = (low + high) // 2
    return high


def _probe(prefix: list[int], bound: int, earliest: list[int], latest: list[int]) -> tuple[bool, int, list[int]]:
    """Fill blocks up to `bound` from the left: whether that reaches the end, the next bound to look at, the ends."""
    end, n = 0, len(prefix) - 1
    largest, next_larger = 0, prefix[-1]
    ends = []
    for first, last in zip(earliest, latest, strict=True):
        base = prefix[end]
        end = bisect_right(prefix, base + bound, first, last + 1) - 1
        ends.append(end)
        largest = max(largest, prefix[end] - base)
        if end < n:
            next_larger = min(next_larger, prefix[end + 1] - base)
    return (True, largest, ends) if end == n else (False, next_larger, ends)
