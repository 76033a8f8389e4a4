"""Break ties between optimal partitions: ends near the quantiles, or the smallest sum of squared loads.

Ends near the quantiles are found directly, from left to right. For the smallest sum of squared loads, a penalty per
block (a Lagrange multiplier) replaces the constraint on the number of blocks: the smallest sum for k blocks is convex
in k, so some penalty has an optimum with k blocks. A search finds it, with one pass over all positions per penalty
(Aggarwal, Schieber and Tokuyama 1994). Penalties are half-integers, so they fall between the integers at which the
optimal number of blocks changes.
"""

from __future__ import annotations

from bisect import bisect_left
from math import isqrt

from ._search import fill_from_right


def near_even(prefix: list[int], bottleneck: int, blocks: int) -> list[int]:
    """Return the ends of non-empty blocks of at most `bottleneck`, each as close to its quantile as the others allow.

    Ties go to the earliest end, even among ends that are only separated by layers of cost zero. O(k log n).
    """
    n, total, lowest = len(prefix) - 1, prefix[-1], fill_from_right(prefix, bottleneck, blocks)
    ends, end, start = [0], 0, 0
    for j in range(1, blocks):
        first, limit, quantile = end + 1, start + bottleneck, -(-total * j // blocks)
        aim = max(lowest[j], min(quantile, limit))
        end = bisect_left(prefix, aim, first, n - blocks + j)  # a later end would leave blocks empty
        start, before = prefix[end], prefix[end - 1]
        nearer = start > limit or 2 * total * j <= blocks * (before + start)
        if nearer and end > first and before >= lowest[j]:
            end, start = bisect_left(prefix, before, first, end - 1), before
        ends.append(end)
    return [*ends, n]


def most_even(prefix: list[int], bottleneck: int, blocks: int) -> list[int]:
    """Return the ends of `blocks` blocks of at most `bottleneck` with the smallest sum of squared loads."""
    # Penalties minus one half: `high` gives at most `blocks` blocks, `low` at least `blocks`.
    high, low = prefix[-1] ** 2 + 1, -1
    coarse, fine = cheapest(prefix, bottleneck, 2 * high + 1), list(range(len(prefix)))
    penalty = (prefix[-1] // blocks) ** 2  # optimal for equal layers
    while len(coarse) - 1 < blocks < len(fine) - 1 and high - low > 1:
        penalty = min(max(penalty, low + 1), high - 1)
        ends = cheapest(prefix, bottleneck, 2 * penalty + 1)
        if len(ends) - 1 > blocks:
            low, fine = penalty, ends
        else:
            high, coarse = penalty, ends
        penalty = isqrt((low + 1) * (high + 1)) - 1  # their geometric mean
    return _splice(coarse, fine, blocks)


def _splice(coarse: list[int], fine: list[int], blocks: int) -> list[int]:
    """Combine two optima for the same penalty into one with `blocks` blocks, which starts like `fine` and ends like
    `coarse`.

    They are joined in a block of `coarse` that contains a block of `fine`: this exchange increases no sum of squares.
    """
    ahead = blocks - len(coarse) + 1
    x = next(x for x in range(len(coarse) - 1) if fine[x + ahead + 1] <= coarse[x + 1])
    return [*fine[: x + ahead + 1], *coarse[x + 1 :]]


def cheapest(prefix: list[int], bottleneck: int, penalty: int) -> list[int]:
    """Return the ends of blocks of at most `bottleneck`, minimizing twice the squared loads plus a penalty per block.

    With a last block from i to j, the cost is best[i] + 2(pⱼ - pᵢ)² + penalty. Apart from 2pⱼ², it is linear in pⱼ for
    each i. Lines of later starts fall more steeply, so once a later start is better, it stays better, and a start that
    exceeds the bottleneck never fits again. The queue holds each start that is optimal from some height (a value of pⱼ)
    on, with this height.
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
