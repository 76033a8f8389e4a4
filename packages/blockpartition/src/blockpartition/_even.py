"""Among the partitions with the least bottleneck, one that is nearly even, found in no time."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate, pairwise

from ._scan import are_short, ends_by_scan

_MOST_GATES = 2**13  # that the string passes: to find where it bends takes longer than all the rest


def gates(prefix: list[int], bottleneck: int, latest: list[int]) -> tuple[list[int], list[int]]:
    """For each end of a block the first and the last position it has in any optimal partition into non-empty blocks.

    latest: the ends of blocks that are filled up to the bottleneck from the left.
    """
    n, blocks = len(prefix) - 1, len(latest)
    last = [0, *map(min, latest, range(n - blocks + 1, n + 1))]
    first = list(map(max, _from_the_right(prefix, bottleneck, blocks), range(blocks + 1)))
    return first, last


def _from_the_right(prefix: list[int], bottleneck: int, blocks: int) -> list[int]:
    """The starts of blocks filled up to the bottleneck from the right, in order, and the end of the last one."""
    n, total = len(prefix) - 1, prefix[-1]
    if are_short(prefix, blocks):
        mirrored = ends_by_scan(list(map(total.__sub__, reversed(prefix))), bottleneck, blocks)
        return [*map(n.__sub__, reversed(mirrored)), n]
    start, starts, window = n, [n], 4 * n // blocks
    for _ in range(blocks):
        limit, close = prefix[start] - bottleneck, max(0, start - window)
        start = bisect_left(prefix, limit, close, start)
        if start == close:
            start = bisect_left(prefix, limit, 0, close)
        starts.append(start)
    return starts[::-1]


def near_even(prefix: list[int], bottleneck: int, latest: list[int]) -> list[int]:
    """Ends of blocks close to the taut string through the gates, in O(k log n).

    Without gates the string is straight and the targets are the quantiles of the total. Of very many gates it passes
    every so-many-th only: a cut is some part of a layer away from it anyway.
    """
    # Lists of ints only: a thousand tuples would wake the garbage collector, which looks at every prefix sum.
    firsts, lasts = gates(prefix, bottleneck, latest)
    low, high = ([prefix[end] for end in ends] for ends in (firsts, lasts))
    goals = doubled_heights(bends(low, high, 1 + len(latest) // _MOST_GATES))
    return near_string(prefix, bottleneck, firsts, lasts, goals)


def near_string(prefix: list[int], bottleneck: int, firsts: list[int], lasts: list[int], goals: list[int]) -> list[int]:
    """Ends within their gates, each the nearest to its height that the end before it allows.

    goals: the heights of the string, doubled.
    """
    ends, end, start, window = [0], 0, 0, 4 * len(prefix) // len(firsts)
    for first, last, twice in zip(firsts[1:], lasts[1:], goals[1:], strict=True):
        limit = start + bottleneck
        if first <= end:
            first = end + 1  # never empty: from any end inside its gate one block reaches the next gate
        if twice > 2 * limit:
            twice = 2 * limit
        # Most ends are close, where the processor has the sums in its cache; a gate may be wide.
        stop = first + window
        end = bisect_left(prefix, (twice + 1) // 2, first, stop if stop < last else last)
        if end == stop < last:
            end = bisect_left(prefix, (twice + 1) // 2, first, last)
        start = prefix[end]
        if end > first and (start > limit or twice <= start + prefix[end - 1]):
            end, start = end - 1, prefix[end - 1]
            if prefix[end - 1] == start:  # of the ends behind layers of zero the first
                end = bisect_left(prefix, start, first, end)
        ends.append(end)
    return ends


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
        heights += [(origin + rise * i) // length for i in range(1, length + 1)]
    return heights


def bends(low: list[int], high: list[int], every: int = 1) -> list[tuple[int, int]]:
    """Where, and how high, the shortest path through the gates low … high at 0, 1, 2, … begins, bends and ends; O(k).

    Of all paths it has the most even steps: the least sum of any convex function of them. It passes every so-many-th
    gate, and the last one.

    From the last bend that is certain, the next gates can be seen in a funnel: above it the ceilings, of which a chain
    with rising slopes is in the way, below it the floors, a chain with falling slopes. A new ceiling below the first
    floor of the chain closes the funnel: the string bends at that floor, and the same the other way round. Each gate
    enters and leaves each chain once (Lee and Preparata 1984).
    """
    at, start, goal = 0, low[0], len(low) - 1
    found = [(at, start)]
    ceilings: deque[int] = deque()
    floors: deque[int] = deque()
    for i in [*range(every, goal, every), goal]:
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
    return found if at == goal else [*found, (goal, low[goal])]


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


def sizes_of(ends: list[int]) -> tuple[int, ...]:
    """Layers between consecutive ends."""
    return tuple(end - start for start, end in pairwise(ends))


def prefix_sums(units: list[int]) -> list[int]:
    """0, u₀, u₀+u₁, …"""
    return list(accumulate(units, initial=0))
