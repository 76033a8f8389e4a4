"""The least sum of squared loads with a price on each block instead of a number of blocks.

The least sum for k blocks is convex in k, since squares are: so there is a price at which k blocks are among the best,
and it is found by a search. At each price one pass over all positions does (Aggarwal, Schieber and Tokuyama 1994).
Prices are odd halves, between those at which another number of blocks is as good.
"""

from __future__ import annotations

from bisect import bisect_left
from math import isqrt


def least_squares(prefix: list[int], bottleneck: int, blocks: int) -> list[int]:
    """The ends of so many blocks up to the bottleneck with the least sum of squared loads."""
    # Prices less a half: at the higher there are at most so many blocks, at the lower at least.
    high, low = prefix[-1] ** 2 + 1, -1
    coarse, fine = [0], list(range(len(prefix)))
    price = (prefix[-1] // blocks) ** 2
    while len(coarse) - 1 < blocks < len(fine) - 1 and high - low > 1:
        price, width = min(max(price, low + 1), high - 1), high - low
        ends = cheapest(prefix, bottleneck, 2 * price + 1)
        if len(ends) - 1 > blocks:
            low, fine = price, ends
        else:
            high, coarse = price, ends
        stalls = 2 * (high - low) > width
        price = isqrt((low + 1) * (high + 1)) if stalls else _between(low, len(fine), high, len(coarse), blocks + 1)
    if len(coarse) == 1:  # no price was tried at which there are so few
        coarse = cheapest(prefix, bottleneck, 2 * high + 1)
    return _spliced(coarse, fine, blocks)


def _between(low: int, most: int, high: int, least: int, wanted: int) -> int:
    """The price for the number that is wanted, if numbers fall in a straight line with the root of the price."""
    start, end = isqrt(low + 1), isqrt(high + 1)
    root: int = start + (end - start) * (most - wanted) // (most - least)
    return root**2


def _spliced(coarse: list[int], fine: list[int], blocks: int) -> list[int]:
    """Of two paths that are the best at a price, one with so many blocks: it begins as the finer, ends as the coarser.

    They are joined in a block of the coarser that holds one of the finer: what the two blocks exchange makes their
    squares no larger, and neither could be smaller.
    """
    ahead = blocks - len(coarse) + 1
    x = next(x for x in range(len(coarse) - 1) if fine[x + ahead + 1] <= coarse[x + 1])
    return [*fine[: x + ahead + 1], *coarse[x + 1 :]]


def cheapest(prefix: list[int], bottleneck: int, price: int) -> list[int]:
    """The ends of blocks up to the bottleneck with the least sum of twice the squared loads and a price for each.

    With a last block from i to j it is best[i] + 2(pⱼ - pᵢ)² + price: in pⱼ, but for 2pⱼ², a line for each i. The best
    i moves right as j does, and is a corner of the lower convex hull of the points (pᵢ, best[i] + 2pᵢ²).
    """
    heights, origin = [0], [0]
    hull, front = [0], 0
    for j in range(1, len(prefix)):
        total = prefix[j]
        slope = 4 * total
        i = hull[front]
        value = heights[i] - slope * prefix[i]
        while front + 1 < len(hull):
            after = hull[front + 1]
            other = heights[after] - slope * prefix[after]
            if other > value:
                break
            front, i, value = front + 1, after, other
        if total - prefix[i] > bottleneck:  # the best of all is too far away
            first = bisect_left(prefix, total - bottleneck)
            values = [heights[i] - slope * prefix[i] for i in range(first, j)]
            value = min(values)
            i = first + values.index(value)
        origin.append(i)
        # best[j] + 2pⱼ², where best[j] is value + 2pⱼ² + price.
        heights.append(value + slope * total + price)
        _add(hull, front, prefix, heights, j)
    ends = [len(prefix) - 1]
    while ends[-1]:
        ends.append(origin[ends[-1]])
    return ends[::-1]


def _add(hull: list[int], front: int, xs: list[int], ys: list[int], new: int) -> None:
    """A corner on the right, and away with those that it puts inside."""
    x, y = xs[new], ys[new]
    while len(hull) - front > 1:
        first, middle = hull[-2], hull[-1]
        if (xs[middle] - xs[first]) * (y - ys[first]) > (ys[middle] - ys[first]) * (x - xs[first]):
            break
        hull.pop()
    hull.append(new)
