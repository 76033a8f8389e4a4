"""Among the partitions with the least bottleneck, the one with the least sum of squared loads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from math import isqrt

from ._even import bends, gates, near_string_exactly, taut_string
from ._fill import fill_back
from ._priced import least_squares
from ._sums import Sums

_MANY = 10  # ends to look at, for each layer: a search by prices is quicker
_NEAR = 4  # positions to either side of a good end that the first search tries


def most_even(sums: Sums, bottleneck: int, highest: list[int]) -> list[int]:
    """Ends of the optimal partition with the least sum of squared loads; the sums are ints.

    Two searches: one close to the string, for a partition that is good, and one among all ends that a better partition
    could have. With w ends a gate left, O(k w log w); where these are many, by prices on blocks, O(n log n) or so.
    """
    prefix, blocks, n = sums.prefix, len(highest), sums.layers
    lowest = fill_back(prefix, bottleneck, blocks)
    low, high = gates(sums, lowest, highest, range(blocks))
    firsts = [max(bisect_left(prefix, height), j) for j, height in low.items()]
    lasts = [min(bisect_right(prefix, height) - 1, n - blocks + j) for j, height in high.items()]
    turns = bends(low, high)
    heights, parts = taut_string(turns)
    near = near_string_exactly(prefix, bottleneck, lowest, turns)
    lows = [max(first, end - _NEAR) for first, end in zip(firsts, near, strict=True)]
    highs = [min(last, end + _NEAR) for last, end in zip(lasts, near, strict=True)]
    good = _least_squares(prefix, bottleneck, lows, highs)
    radii = _radii(_squares(prefix, good) - _floor(heights, parts), len(good) - 1)
    for j, (height, part, radius) in enumerate(zip(heights, parts, radii, strict=True)):
        lows[j] = bisect_left(prefix, -((radius * part - height) // part), firsts[j], lasts[j])
        highs[j] = bisect_right(prefix, height // part + radius + 1, lows[j], lasts[j] + 1) - 1
    if sum(highs) - sum(lows) > _MANY * n:
        return least_squares(prefix, bottleneck, blocks)
    return _least_squares(prefix, bottleneck, lows, highs)


def _squares(prefix: list[int], ends: list[int]) -> int:
    return sum((prefix[end] - prefix[start]) ** 2 for start, end in pairwise(ends))


def _floor(heights: list[int], parts: list[int]) -> int:
    """The sum of the squared steps of the string, or a little less: nothing within the gates has a smaller sum."""
    steps = (
        (end * before - start * part, before * part)
        for (start, end), (before, part) in zip(pairwise(heights), pairwise(parts), strict=True)
    )
    precise = 2**40
    return sum(precise * step * step // (part * part) for step, part in steps) // precise


def _radii(slack: int, blocks: int) -> list[int]:
    """How far from the string the ends of a partition can be that is no worse than the string by more than the slack.

    The string h is the least of a convex set. So if x is within the gates, Σ Δx² ≥ Σ Δh² + Σ Δ(x - h)², and where x - h
    is d at the j-th of k ends, the last sum is at least d²/j + d²/(k - j).
    """
    return [isqrt(slack * j * (blocks - j) // blocks) + 1 for j in range(blocks + 1)]


def _least_squares(prefix: list[int], bottleneck: int, lows: list[int], highs: list[int]) -> list[int]:
    """The ends with the least sum of squares among those with the j-th end in lows[j] … highs[j]."""
    best, first = [0], 0
    firsts, origins = [0], []
    for low, high in zip(lows[1:], highs[1:], strict=True):
        # A layer never exceeds the bottleneck: what lies between the nearest and the furthest end can be reached.
        furthest = bisect_right(prefix, prefix[first + len(best) - 1] + bottleneck) - 1
        here = range(max(low, first + 1), min(high, furthest) + 1)
        best, origin = _row(prefix, bottleneck, best, first, here)
        first = here[0]
        firsts.append(first)
        origins.append(origin)
    ends = [len(prefix) - 1]
    for first, origin in zip(reversed(firsts[1:]), reversed(origins), strict=True):
        ends.append(origin[ends[-1] - first])
    return ends[::-1]


def _row(prefix: list[int], bottleneck: int, best: list[int], first: int, ends: range) -> tuple[list[int], list[int]]:
    """Least sum of squares up to each of the ends, and where its last block starts.

    best: the same up to `first` and each position after it. The squared load of a block is convex in its length, so the
    best start never moves left as the end moves right: the middle end's start splits the search for the others.
    """
    starts = prefix[first : first + len(best)]
    # (e - s)² = e² - 2es + s²: the part without e is added only once.
    known = [least + total * total for least, total in zip(best, starts, strict=True)]
    sums, origin = [0] * len(ends), [0] * len(ends)
    todo = [(0, len(ends) - 1, 0, len(best) - 1)]
    while todo:
        low, high, left, right = todo.pop()
        i = (low + high) // 2
        end, total = ends[i], prefix[ends[i]]
        fits = max(left, bisect_left(starts, total - bottleneck, left, right + 1))
        stop = min(right + 1, end - first)
        twice = 2 * total
        values = [least - twice * start for least, start in zip(known[fits:stop], starts[fits:stop], strict=True)]
        least = min(values)
        best_start = fits + values.index(least)
        sums[i], origin[i] = least + total * total, first + best_start
        if low < i:
            todo.append((low, i - 1, left, best_start))
        if i < high:
            todo.append((i + 1, high, best_start, right))
    return sums, origin
