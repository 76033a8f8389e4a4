"""Among the partitions with the least bottleneck, an even one: near the quantiles, or with the least sum of squares.

The first is found at once, end by end. For the least sum of squared loads, a penalty on each block takes the place of the
number of blocks: the least sum for k blocks is convex in k, so there is a penalty at which k blocks are among the best. A
search finds it, with one pass over all positions for each penalty (Aggarwal, Schieber and Tokuyama 1994). Penalties are odd
halves, between those at which another number of blocks is as good.
"""

from __future__ import annotations

from bisect import bisect_left
from math import isqrt

from ._search import fill_from_right


def near_even(prefix: list[int], bottleneck: int, blocks: int) -> list[int]:
    """Ends of non-empty blocks up to the bottleneck, each as close to its quantile of the total as the others allow.

    Of equally near ends it is the earlier, and of those behind layers of zero the first. O(k log n).
    """
    n, total, lowest = len(prefix) - 1, prefix[-1], fill_from_right(prefix, bottleneck, blocks)
    ends, end, start = [0], 0, 0
    for j in range(1, blocks):
        first, limit, quantile = end + 1, start + bottleneck, -(-total * j // blocks)
        aim = max(lowest[j], min(quantile, limit))
        end = bisect_left(prefix, aim, first, n - blocks + j)  # beyond it, some of the rest would be empty
        start, before = prefix[end], prefix[end - 1]
        nearer = start > limit or 2 * total * j <= blocks * (before + start)
        if nearer and end > first and before >= lowest[j]:
            end, start = bisect_left(prefix, before, first, end - 1), before
        ends.append(end)
    return [*ends, n]


def most_even(prefix: list[int], bottleneck: int, blocks: int) -> list[int]:
    """The ends of so many blocks up to the bottleneck with the least sum of squared loads, in O(n) a penalty."""
    # Penalties less a half: at the higher there are at most so many blocks, at the lower at least.
    high, low = prefix[-1] ** 2 + 1, -1
    coarse, fine = cheapest(prefix, bottleneck, 2 * high + 1), list(range(len(prefix)))
    penalty = (prefix[-1] // blocks) ** 2  # right at once where the layers are alike
    while len(coarse) - 1 < blocks < len(fine) - 1 and high - low > 1:
        penalty = min(max(penalty, low + 1), high - 1)
        ends = cheapest(prefix, bottleneck, 2 * penalty + 1)
        if len(ends) - 1 > blocks:
            low, fine = penalty, ends
        else:
            high, coarse = penalty, ends
        penalty = isqrt((low + 1) * (high + 1)) - 1  # in the middle of their digits
    return _spliced(coarse, fine, blocks)


def _spliced(coarse: list[int], fine: list[int], blocks: int) -> list[int]:
    """Of two paths that are the best at a penalty, one with so many blocks: it begins as the finer, ends as the coarser.

    They are joined in a block of the coarser that holds one of the finer: the exchange makes no square sum larger.
    """
    ahead = blocks - len(coarse) + 1
    x = next(x for x in range(len(coarse) - 1) if fine[x + ahead + 1] <= coarse[x + 1])
    return [*fine[: x + ahead + 1], *coarse[x + 1 :]]


def cheapest(prefix: list[int], bottleneck: int, penalty: int) -> list[int]:
    """The ends of blocks up to the bottleneck with the least sum of twice the squared loads and a penalty for each.

    With a last block from i to j it is best[i] + 2(pⱼ - pᵢ)² + penalty: in pⱼ, but for 2pⱼ², a line for each i. Once a
    later start is better it stays so, since its line is steeper; so does a start that is too far away for the
    bottleneck. The queue holds the starts that are the best from some height on, with that height.
    """
    values, origin = [0], [0]  # values[i] is best[i] + 2pᵢ²
    starts, since, front = [0], [0], 0
    for j in range(1, len(prefix)):
        total = prefix[j]
        while front + 1 < len(starts) and since[front + 1] <= total:
            front += 1
        i = starts[front]
        origin.append(i)
        value = values[i] + 4 * total * (total - prefix[i]) + penalty
        values.append(value)
        while True:
            i = starts[-1]
            rise, more = total - prefix[i], value - values[i]
            height = prefix[i] + bottleneck + 1
            if rise:
                height = min(height, -(-more // (4 * rise)))
            elif more <= 0:
                height = total
            if height > since[-1] or len(starts) - front == 1:
                break
            starts.pop()
            since.pop()
        starts.append(j)
        since.append(height)
    ends = [len(prefix) - 1]
    while ends[-1]:
        ends.append(origin[ends[-1]])
    return ends[::-1]
