"""Among the partitions with the least bottleneck, an even one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise

Gate = tuple[int, int]


def gates(prefix: list[int], blocks: int, bottleneck: int) -> tuple[list[int], list[int]]:
    """For each end of a block the first and the last position it has in any optimal partition into non-empty blocks."""
    n = len(prefix) - 1
    last = [0]
    for j in range(1, blocks + 1):
        reach = bisect_right(prefix, prefix[last[-1]] + bottleneck, last[-1]) - 1
        last.append(min(reach, n - blocks + j))
    first = [n]
    for j in range(blocks - 1, -1, -1):
        reach = bisect_left(prefix, prefix[first[-1]] - bottleneck, 0, first[-1])
        first.append(max(reach, j))
    return first[::-1], last


def near_even(prefix: list[int], blocks: int, bottleneck: int) -> list[int]:
    """Ends of blocks close to the taut string through the gates, in O(k log n) where the string bends seldom.

    Without gates the string is straight and the targets are the quantiles of the total.
    """
    # Lists of ints only: a thousand tuples would wake the garbage collector, which looks at every prefix sum.
    firsts, lasts = gates(prefix, blocks, bottleneck)
    heights, parts = taut_string([prefix[first] for first in firsts], [prefix[last] for last in lasts])
    ends = [0]
    for j in range(1, blocks + 1):
        # Never empty: from any end inside its gate one block reaches the next gate.
        first = max(firsts[j], ends[-1] + 1)
        last = min(lasts[j], bisect_right(prefix, prefix[ends[-1]] + bottleneck, first, lasts[j] + 1) - 1)
        ends.append(_nearest(prefix, heights[j], parts[j], first, last))
    return ends


def taut_string(low: list[int], high: list[int]) -> tuple[list[int], list[int]]:
    """Heights, as numerators and denominators, of the shortest path through the gates low … high at 0, 1, 2, …

    Of all paths it has the most even steps: the least sum of any convex function of them.
    """
    heights, parts = [low[0]], [1]
    while len(heights) < len(low):
        at, start = len(heights) - 1, heights[-1]
        turn, goal = _next_bend(low, high, at, start)
        heights += [start * (turn - i) + goal * (i - at) for i in range(at + 1, turn)]
        parts += [turn - at] * (turn - at - 1)
        heights.append(goal)
        parts.append(1)
    return heights, parts


def _next_bend(low: list[int], high: list[int], at: int, start: int) -> tuple[int, int]:
    """Where, and how high, the string from (at, start) bends first: the end of the line of sight through the gates."""
    floor = ceiling = at + 1
    for i in range(at + 1, len(low)):
        # Steeper than the lowest ceiling so far: the string bends there, and the same with the highest floor.
        if (low[i] - start) * (ceiling - at) > (high[ceiling] - start) * (i - at):
            return ceiling, high[ceiling]
        if (high[i] - start) * (floor - at) < (low[floor] - start) * (i - at):
            return floor, low[floor]
        if (low[i] - start) * (floor - at) >= (low[floor] - start) * (i - at):
            floor = i
        if (high[i] - start) * (ceiling - at) <= (high[ceiling] - start) * (i - at):
            ceiling = i
    return len(low) - 1, low[-1]


def _nearest(prefix: list[int], target: int, parts: int, first: int, last: int) -> int:
    """The position in first … last whose prefix is nearest to target/parts; the earlier of two."""
    right = bisect_left(prefix, -(-target // parts), first, last)
    if right > first and target - parts * prefix[right - 1] <= parts * prefix[right] - target:
        return bisect_left(prefix, prefix[right - 1], first, right)
    return right


def most_even(prefix: list[int], blocks: int, bottleneck: int) -> list[int]:
    """Ends of the optimal partition with the least sum of squared loads, earliest ends among equals; O(k n log n)."""
    passages = zip(*gates(prefix, blocks, bottleneck), strict=True)
    best = {0: 0}
    origins = []
    for here, there in pairwise(passages):
        best, origin = _row(prefix, bottleneck, best, here, there)
        origins.append(origin)
    ends = [len(prefix) - 1]
    for origin in reversed(origins):
        ends.append(origin[ends[-1]])
    return ends[::-1]


def _row(
    prefix: list[int], bottleneck: int, best: dict[int, int], here: Gate, there: Gate
) -> tuple[dict[int, int], dict[int, int]]:
    """Least sum of squares up to each end in `there`, and where its last block starts in `here`.

    The squared load of a block is convex in its length, so the best start never moves left as the end moves right:
    the middle end's start splits the search for the others.
    """
    sums, origin = {}, {}
    todo = [(*there, *here)]
    while todo:
        low, high, first, last = todo.pop()
        end = (low + high) // 2
        fits = bisect_left(prefix, prefix[end] - bottleneck, first, last + 1)
        sums[end], start = min(
            (best[s] + (prefix[end] - prefix[s]) ** 2, s) for s in range(fits, min(last, end - 1) + 1)
        )
        origin[end] = start
        if low < end:
            todo.append((low, end - 1, first, start))
        if end < high:
            todo.append((end + 1, high, start, last))
    return sums, origin


def sizes_of(ends: list[int]) -> tuple[int, ...]:
    """Layers between consecutive ends."""
    return tuple(end - start for start, end in pairwise(ends))


def prefix_sums(units: list[int]) -> list[int]:
    """0, u₀, u₀+u₁, …"""
    return list(accumulate(units, initial=0))
