"""Among the partitions with the least bottleneck, one that is nearly even, found in no time."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, count, islice, pairwise, repeat
from operator import floordiv
from typing import TypeAlias

from ._fill import fill_back, window

Gates: TypeAlias = dict[int, int]
"""Heights by the numbers of ends."""

_MOST_GATES = 2**13  # that the string passes: to find where it bends takes longer than all the rest


def near_even(prefix: list[int], bottleneck: int, highest: list[int]) -> list[int]:
    """Ends of blocks close to the taut string through the gates, in O(k log n).

    Without gates the string is straight and the targets are the quantiles of the total. Of very many gates it passes
    every so-many-th only: a cut is some part of a layer away from it anyway.

    highest: of the ends of blocks that are filled up to the bottleneck from the left.
    """
    blocks = len(highest)
    lowest = fill_back(prefix, bottleneck, blocks)
    low, high = gates(prefix, lowest, highest, range(0, blocks, 1 + blocks // _MOST_GATES))
    return near_string(prefix, bottleneck, lowest, doubled_heights(bends(low, high)))


def gates(prefix: list[int], lowest: list[int], highest: list[int], ends: Iterable[int]) -> tuple[Gates, Gates]:
    """The least and the greatest height of these ends, and the last, in an optimal partition into non-empty blocks."""
    blocks, total = len(highest), prefix[-1]
    more = len(prefix) - 1 - blocks
    low = {j: max(lowest[j], prefix[j]) for j in ends}
    high = {j: min(highest[j - 1], prefix[more + j]) if j else 0 for j in ends}
    return low | {blocks: total}, high | {blocks: total}


def near_string(prefix: list[int], bottleneck: int, lowest: list[int], goals: list[int]) -> list[int]:
    """Ends of non-empty blocks up to the bottleneck, each the nearest to its height that the end before it allows.

    lowest: the least heights from which the rest can be done.
    goals: the heights of the string, doubled.
    """
    n, blocks = len(prefix) - 1, len(goals) - 1
    ends, end, start, near, last = [0], 0, 0, window(prefix, blocks), n - blocks
    for low, twice in zip(lowest[1:-1], goals[1:-1], strict=True):
        limit, first = start + bottleneck, end + 1
        last += 1
        if twice > 2 * limit:
            twice = 2 * limit
        goal = (twice + 1) // 2
        if goal < low:
            goal = low
        # Most ends are close, where the processor has the sums in its cache; a gate may be wide.
        stop = first + near
        end = bisect_left(prefix, goal, first, stop if stop < last else last)
        if end == stop < last:
            end = bisect_left(prefix, goal, end, last)
        start, before = prefix[end], prefix[end - 1]
        if end > first and before >= low and (start > limit or twice <= start + before):
            end, start = end - 1, before
            if prefix[end - 1] == start:  # of the ends behind layers of zero the first
                end = bisect_left(prefix, start, first, end)
        ends.append(end)
    return [*ends, n]


def taut_string(turns: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Heights, as numerators and denominators, at 0, 1, 2, … of the string with these bends."""
    heights, parts = [turns[0][1]], [1]
    for (at, start), (turn, goal) in pairwise(turns):
        heights += [start * (turn - i) + goal * (i - at) for i in range(at + 1, turn)]
        parts += [turn - at] * (turn - at - 1)
        heights.append(goal)
        parts.append(1)
    return heights, parts


def doubled_heights(turns: list[tuple[int, int]]) -> list[int]:
    """Twice the heights of the string, rounded up: what tells exactly which side of the middle of two ends it is on."""
    heights = [2 * turns[0][1]]
    for (at, start), (turn, goal) in pairwise(turns):
        length, rise = turn - at, 2 * (goal - start)
        origin = (2 * start + 1) * length - 1
        heights += map(floordiv, islice(count(origin + rise, rise), length), repeat(length))
    return heights


def bends(low: Gates, high: Gates) -> list[tuple[int, int]]:
    """Where, and how high, the shortest path through the gates low … high begins, bends and ends; O(gates).

    Of all paths it has the most even steps: the least sum of any convex function of them. The gates are in order; the
    first has the number 0.

    From the last bend that is certain, the next gates can be seen in a funnel: above it the ceilings, of which a chain
    with rising slopes is in the way, below it the floors, a chain with falling slopes. A new ceiling below the first
    floor of the chain closes the funnel: the string bends at that floor, and the same the other way round. Each gate
    enters and leaves each chain once (Lee and Preparata 1984).
    """
    at, start = 0, low[0]
    found = [(at, start)]
    ceilings: deque[int] = deque()
    floors: deque[int] = deque()
    for i in islice(low, 1, None):
        _extend(ceilings, high, i, at, start, 1)
        while floors and len(ceilings) == 1 and _turn(at, start, floors[0], low[floors[0]], i, high[i]) < 0:
            at = floors.popleft()
            start = low[at]
            found.append((at, start))
        _extend(floors, low, i, at, start, -1)
        while len(floors) == 1 and _turn(at, start, ceilings[0], high[ceilings[0]], i, low[i]) > 0:
            at = ceilings.popleft()
            start = high[at]
            found.append((at, start))
    goal = next(reversed(low))
    return found if at == goal else [*found, (goal, low[goal])]


def _extend(chain: deque[int], heights: Gates, i: int, at: int, start: int, side: int) -> None:
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


def sizes_of(ends: list[int]) -> tuple[int, ...]:
    """Layers between consecutive ends."""
    return tuple(end - start for start, end in pairwise(ends))


def prefix_sums(units: list[int]) -> list[int]:
    """0, u₀, u₀+u₁, …"""
    return list(accumulate(units, initial=0))
