"""The least possible bottleneck, by a search between what fits and what provably does not.

Pınar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning" (2004), after Nicol (1994).
Everything here is in integers: `prefix[i]` is the sum of the first i costs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import chain
from operator import sub

from ._scan import are_short, ends_by_scan


def least_bottleneck(prefix: list[int], blocks: int, heaviest: int) -> tuple[int, list[int]]:
    """The smallest bound under which `blocks` blocks hold everything, and the ends of blocks filled up to it.

    Both ends of the search are sums that occur: a success lowers the upper end to the largest block it made, a failure
    raises the lower end to the smallest sum that would have changed it. So the search ends on the optimum, exactly.
    """
    total, n = prefix[-1], len(prefix) - 1
    mean = -(-total // blocks)
    low, high = max(mean, heaviest), total
    # The j-th end of a greedy pass only grows with the bound: earlier passes fence in the later ones.
    earliest, latest = [0] * blocks, [n] * blocks
    missing = surplus = None
    # Half a layer is lost at the end of a mean block; where one layer weighs more than that, try it first.
    bound = low if heaviest > mean else low + -(-total // (2 * n))
    while low < high:
        bound, width = min(max(bound, low), high - 1), high - low
        ends = _greedy_ends(prefix, bound, earliest, latest)
        if ends[-1] == n:
            surplus = bound, _surplus(prefix, ends, bound)
            latest, high = ends, _largest(prefix, ends)
        else:
            missing = bound, total - prefix[ends[-1]]
            earliest, low = ends, _next_sum(prefix, ends)
        # Halving now and then keeps the number of passes logarithmic whatever the costs are.
        slow = 2 * (high - low) > width and missing is not None and surplus is not None
        bound = (low + high) // 2 if slow else _guess(missing, surplus, blocks)
    return high, latest


def _guess(missing: tuple[int, int] | None, surplus: tuple[int, int] | None, blocks: int) -> int:
    """The bound under which nothing is missing and nothing is left over, if both are proportional to it."""
    if missing is None:
        assert surplus is not None
        return surplus[0] - surplus[1] // blocks - 1
    if surplus is None:
        return missing[0] + missing[1] // blocks + 1
    return missing[0] + (surplus[0] - missing[0]) * missing[1] // (missing[1] + surplus[1])


def _greedy_ends(prefix: list[int], bound: int, earliest: list[int], latest: list[int]) -> list[int]:
    """Fill blocks up to the bound from the left; this is where the time goes."""
    if are_short(prefix, len(latest)):
        return ends_by_scan(prefix, bound, len(latest))
    end, ends, window = 0, [], 4 * len(prefix) // len(latest)
    for first, last in zip(earliest, latest, strict=True):
        # Most ends are close, where the processor has the sums in its cache; the fences are far apart at first.
        limit, stop = prefix[end] + bound, end + window
        if stop > last:
            stop = last + 1
        end = bisect_right(prefix, limit, end, stop) - 1
        if end + 1 == stop <= last:
            end = bisect_right(prefix, limit, max(first, end), last + 1) - 1
        ends.append(end)
    return ends


def _surplus(prefix: list[int], ends: list[int], bound: int) -> int:
    """How much more blocks that reached the end could have held, without what is lost between the layers."""
    last = bisect_left(ends, ends[-1])
    filled = prefix[-1] - prefix[ends[last - 1] if last else 0]
    return (len(ends) - last) * bound - filled


def _largest(prefix: list[int], ends: list[int]) -> int:
    """The sum of the largest block."""
    sums = list(map(prefix.__getitem__, ends))
    largest: int = max(map(sub, sums, [0, *sums]))
    return largest


def _next_sum(prefix: list[int], ends: list[int]) -> int:
    """The least sum of a block and the layer after it."""
    starts = map(prefix.__getitem__, chain([0], ends))
    nearest: int = min(map(sub, map(prefix.__getitem__, map((1).__add__, ends)), starts))
    return nearest
