"""Among the partitions with the least bottleneck, one that is nearly even, found in no time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from itertools import accumulate, pairwise


def gates(prefix: list[int], bottleneck: int, latest: list[int]) -> tuple[list[int], list[int]]:
    """For each end of a block the first and the last position it has in any optimal partition into non-empty blocks.

    latest: the ends of blocks that are filled up to the bottleneck from the left.
    """
    n, blocks = len(prefix) - 1, len(latest)
    last = [0, *map(min, latest, range(n - blocks + 1, n + 1))]
    first = [n]
    for j in range(blocks - 1, -1, -1):
        reach = bisect_left(prefix, prefix[first[-1]] - bottleneck, 0, first[-1])
        first.append(max(reach, j))
    return first[::-1], last


def near_even(prefix: list[int], bottleneck: int, latest: list[int]) -> list[int]:
    """Ends of blocks close to the taut string through the gates, in O(k log n).

    Without gates the string is straight and the targets are the quantiles of the total.
    """
    # Lists of ints only: a thousand tuples would wake the garbage collector, which looks at every prefix sum.
    firsts, lasts = gates(prefix, bottleneck, latest)
    heights, parts = taut_string([prefix[first] for first in firsts], [prefix[last] for last in lasts])
    return near_string(prefix, bottleneck, firsts, lasts, heights, parts)


def near_string(
    prefix: list[int], bottleneck: int, firsts: list[int], lasts: list[int], heights: list[int], parts: list[int]
) -> list[int]:
    """Ends within their gates, each the nearest to its height that the end before it allows."""
    ends = [0]
    for j in range(1, len(firsts)):
        # Never empty: from any end inside its gate one block reaches the next gate.
        first = max(firsts[j], ends[-1] + 1)
        last = min(lasts[j], bisect_right(prefix, prefix[ends[-1]] + bottleneck, first, lasts[j] + 1) - 1)
        ends.append(_nearest(prefix, heights[j], parts[j], first, last))
    return ends


def taut_string(low: list[int], high: list[int]) -> tuple[list[int], list[int]]:
    """Heights, as numerators and denominators, of the shortest path through the gates low … high at 0, 1, 2, …; O(k).

    Of all paths it has the most even steps: the least sum of any convex function of them.
    """
    heights, parts = [low[0]], [1]
    for (at, start), (turn, goal) in pairwise(_bends(low, high)):
        heights += [start * (turn - i) + goal * (i - at) for i in range(at + 1, turn)]
        parts += [turn - at] * (turn - at - 1)
        heights.append(goal)
        parts.append(1)
    return heights, parts


def _bends(low: list[int], high: list[int]) -> Iterator[tuple[int, int]]:
    """Where, and how high, the string through the gates begins, bends and ends.

    From the last bend that is certain, the next gates can be seen in a funnel: above it the ceilings, of which a chain
    with rising slopes is in the way, below it the floors, a chain with falling slopes. A new ceiling below the first
    floor of the chain closes the funnel: the string bends at that floor, and the same the other way round. Each gate
    enters and leaves each chain once (Lee and Preparata 1984).
    """
    at, start, goal = 0, low[0], len(low) - 1
    yield at, start
    ceilings: deque[int] = deque()
    floors: deque[int] = deque()
    for i in range(1, len(low)):
        _extend(ceilings, high, i, at, start, 1)
        while floors and len(ceilings) == 1 and _turn(at, start, floors[0], low[floors[0]], i, high[i]) < 0:
            at = floors.popleft()
            start = low[at]
            yield at, start
        _extend(floors, low, i, at, start, -1)
        while len(floors) == 1 and _turn(at, start, ceilings[0], high[ceilings[0]], i, low[i]) > 0:
            at = ceilings.popleft()
            start = high[at]
            yield at, start
    if at < goal:
        yield goal, low[goal]


def _extend(chain: deque[int], heights: list[int], i: int, at: int, start: int, side: int) -> None:
    """Add a gate to the chain that begins at (at, start), without those that it puts out of sight."""
    while chain:
        before = chain[-2] if len(chain) > 1 else at
        origin = heights[before] if len(chain) > 1 else start
        if side * _turn(before, origin, chain[-1], heights[chain[-1]], i, heights[i]) > 0:
            break
        chain.pop()
    chain.append(i)


def _turn(at: int, start: int, via: int, middle: int, to: int, end: int) -> int:
    """Positive where the way from (at, start) to (to, end) passes above (via, middle), negative where below."""
    return (end - start) * (via - at) - (middle - start) * (to - at)


def _nearest(prefix: list[int], target: int, parts: int, first: int, last: int) -> int:
    """The position in first … last whose prefix is nearest to target/parts; the earlier of two."""
    right = bisect_left(prefix, -(-target // parts), first, last)
    if right > first and target - parts * prefix[right - 1] <= parts * prefix[right] - target:
        return bisect_left(prefix, prefix[right - 1], first, right)
    return right


def sizes_of(ends: list[int]) -> tuple[int, ...]:
    """Layers between consecutive ends."""
    return tuple(end - start for start, end in pairwise(ends))


def prefix_sums(units: list[int]) -> list[int]:
    """0, u₀, u₀+u₁, …"""
    return list(accumulate(units, initial=0))
