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
    low, high, step = -(-total // blocks), total, -(-total // n)
    # The j-th end of a greedy pass only grows with the bound: earlier passes fence in the later ones.
    earliest, latest = [0] * blocks, [n] * blocks
    while low < high:
        # The optimum mostly lies a few layers above the mean: look there first, in strides that double.
        ends = _greedy_ends(prefix, min(low + step, (low + high) // 2), earliest, latest)
        if ends[-1] == n:
            latest, high = ends, max(_block_sums(prefix, ends, 0))
        else:
            earliest, low, step = ends, min(_block_sums(prefix, ends, 1)), 2 * step
    return high


def _greedy_ends(prefix: list[int], bound: int, earliest: list[int], latest: list[int]) -> list[int]:
    """Fill blocks up to the bound from the left; this is where the time goes."""
    end, ends = 0, []
    for first, last in zip(earliest, latest, strict=True):
        end = bisect_right(prefix, prefix[end] + bound, first, last + 1) - 1
        ends.append(end)
    return ends


def _block_sums(prefix: list[int], ends: list[int], more: int) -> list[int]:
    """The sums of the blocks, each with so many more layers."""
    starts = [0, *ends[:-1]]
    return [prefix[end + more] - prefix[start] for start, end in zip(starts, ends, strict=True)]
