"""Among the partitions with the least bottleneck, an even one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise

Gate = tuple[int, int]


def gates(prefix: list[int], blocks: int, bottleneck: int) -> list[Gate]:
    """For each end of a block the first and last position it has in any optimal partition into non-empty blocks."""
    n = len(prefix) - 1
    last = [0]
    for j in range(1, blocks + 1):
        reach = bisect_right(prefix, prefix[last[-1]] + bottleneck, last[-1]) - 1
        last.append(min(reach, n - blocks + j))
    first = [n]
    for j in range(blocks - 1, -1, -1):
        reach = bisect_left(prefix, prefix[first[-1]] - bottleneck, 0, first[-1])
        first.append(max(reach, j))
    return list(zip(reversed(first), last, strict=True))


def near_even(prefix: list[int], blocks: int, bottleneck: int) -> list[int]:
    """Ends of blocks close to the taut string through the gates, in O(k log n) where the string bends seldom.

    Without gates the string is straight and the targets are the quantiles of the total.
    """
    passages = gates(prefix, blocks, bottleneck)
    targets = taut_string([(prefix[first], prefix[last]) for first, last in passages])
    ends = [0]
    for (first, last), (target, parts) in zip(passages[1:], targets[1:], strict=True):
        # Never empty: from any end inside its gate one block reaches the next gate.
        first = max(first, ends[-1] + 1)
        last = min(last, bisect_right(prefix, prefix[ends[-1]] + bottleneck, first, last + 1) - 1)
        ends.append(_nearest(prefix, target, parts, first, last))
    return ends


def taut_string(passages: list[Gate]) -> list[tuple[int, int]]:
    """Heights, as quotients, of the shortest path through the gates at 0, 1, 2, …

    Of all paths it has the most even steps: the least sum of any convex function of them.
    """
    heights = [(passages[0][0], 1)]
    while len(heights) < len(passages):
        at, base = len(heights) - 1, passages[len(heights) - 1]
        start = heights[-1][0]
        assert heights[-1][1] == 1, base  # the string bends only at an end of a gate
        turn, goal = _next_bend(passages, at, start)
        heights += [(start * (turn - i) + goal * (i - at), turn - at) for i in range(at + 1, turn)]
        heights.append((goal, 1))
    return heights


def _next_bend(passages: list[Gate], at: int, start: int) -> tuple[int, int]:
    """Where, and how high, the string from (at, start) bends first: the end of the line of sight through the gates."""
    floor = ceiling = at + 1
    for i in range(at + 1, len(passages)):
        low, high = passages[i]
        # Steeper than the lowest ceiling so far: the string bends there, and the same with the highest floor.
        if (low - start) * (ceiling - at) > (passages[ceiling][1] - start) * (i - at):
            return ceiling, passages[ceiling][1]
        if (high - start) * (floor - at) < (passages[floor][0] - start) * (i - at):
            return floor, passages[floor][0]
        if (low - start) * (floor - at) >= (passages[floor][0] - start) * (i - at):
            floor = i
        if (high - start) * (ceiling - at) <= (passages[ceiling][1] - start) * (i - at):
            ceiling = i
    return len(passages) - 1, passages[-1][1]


def _nearest(prefix: list[int], target: int, parts: int, first: int, last: int) -> int:
    """The position in first … last whose prefix is nearest to target/parts; the earlier of two."""
    right = bisect_left(prefix, -(-target // parts), first, last)
    if right > first and target - parts * prefix[right - 1] <= parts * prefix[right] - target:
        return bisect_left(prefix, prefix[right - 1], first, right)
    return right


def most_even(prefix: list[int], blocks: int, bottleneck: int) -> list[int]:
    """Ends of the optimal partition with the least sum of squared loads, earliest ends among equals; O(k n log n)."""
    passages = gates(prefix, blocks, bottleneck)
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
