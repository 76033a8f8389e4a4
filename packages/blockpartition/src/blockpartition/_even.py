"""Among the partitions with the least bottleneck, one that is nearly even, found quickly."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, count, islice, pairwise, repeat
from operator import floordiv, sub
from typing import Any, TypeAlias

from ._fill import fill_back, window
from ._sums import Sums

Gates: TypeAlias = dict[int, int]
"""Heights by the numbers of ends."""

_MOST_GATES = 2**12  # that the string passes: to find where it bends takes longer than all the rest
_TAIL = 64  # blocks among which what one of them would have is spread
_EXACT = 2**50  # floats have an exact half of all ints below
_SHORT = 8  # layers of a block; a bisection takes about as long as a look at so many


def near_even(sums: Sums, bottleneck: int, highest: list[Any]) -> list[int]:
    """Ends of blocks close to the taut string through the gates, in O(k log n).

    Without gates the string is straight and the targets are the quantiles of the total. Of very many gates it passes
    every so-many-th only: a cut is some part of a layer away from it anyway.

    Where very many blocks, filled from the left, leave hardly one of them over, no partition differs from them by much:
    these are taken, and only the last of them evened out.

    highest: heights of the ends of blocks that are filled up to the bottleneck from the left.
    """
    blocks = len(highest)
    head = blocks - _TAIL * (1 + blocks - bisect_left(highest, highest[-1]))
    if blocks <= _MOST_GATES or 2 * head < blocks:
        return _near_the_string(sums, bottleneck, highest)
    ends = _positions(sums.prefix, highest[:head])
    tail = replace(sums, prefix=sums.prefix[ends[-1] :])
    if tail.layers < blocks - head:
        return _near_the_string(sums, bottleneck, highest)
    rest = _near_the_string(tail, bottleneck, highest[head:])
    return [0, *ends, *map(ends[-1].__add__, islice(rest, 1, None))]


def _positions(prefix: list[Any], heights: list[Any]) -> list[int]:
    """The first positions with these heights, which are in order."""
    at, index = 0, prefix.index
    return [at := index(height, at) for height in heights]


def _near_the_string(sums: Sums, bottleneck: int, highest: list[Any]) -> list[int]:
    """As `near_even`, for any number of blocks."""
    blocks, bound = len(highest), bottleneck * sums.unit
    lowest = fill_back(sums.prefix, bound, blocks)
    turns = bends(*gates(sums, lowest, highest, range(0, blocks, 1 + blocks // _MOST_GATES)))
    if isinstance(sums.unit, int) and sums.total >= _EXACT:
        return near_string_exactly(sums.prefix, bound, lowest, turns)
    return near_string(sums.prefix, bound, lowest, heights_of(turns, sums.prefix[0], sums.unit))


def gates(sums: Sums, lowest: list[Any], highest: list[Any], ends: Iterable[int]) -> tuple[Gates, Gates]:
    """The least and the greatest height, in units, of these ends, and the last, in an optimal partition."""
    prefix, blocks = sums.prefix, len(highest)
    more = sums.layers - blocks
    low = {j: sums.units(max(lowest[j], prefix[j])) for j in ends}
    high = {j: sums.units(min(highest[j - 1], prefix[more + j])) if j else 0 for j in ends}
    return low | {blocks: sums.total}, high | {blocks: sums.total}


def near_string_exactly(
    prefix: list[int], bottleneck: int, lowest: list[int], turns: list[tuple[int, int]]
) -> list[int]:
    """`near_string` where sums are ints: with all of them doubled, which tells on which side of a middle a goal is."""
    twice = [2 * height for height in prefix]
    return near_string(twice, 2 * bottleneck, [2 * height for height in lowest], doubled_heights(turns))


def near_string(prefix: list[Any], bottleneck: Any, lowest: list[Any], goals: list[Any]) -> list[int]:
    """Ends of non-empty blocks up to the bottleneck, each the nearest to its goal that the end before it allows.

    Of two that are as near it is the earlier, and of the ends behind layers of zero the first.

    lowest: the least heights from which the rest can be done.
    goals: the heights of the string.
    """
    near = _near_by_looks if len(prefix) <= _SHORT * len(goals) else _near_by_bisection
    return near(prefix, bottleneck, lowest, goals)


def _near_by_bisection(prefix: list[Any], bottleneck: Any, lowest: list[Any], goals: list[Any]) -> list[int]:
    n, blocks = len(prefix) - 1, len(goals) - 1
    ends, end, start, near, last = [0], 0, prefix[0], window(prefix, blocks), n - blocks
    for low, goal in zip(lowest[1:-1], goals[1:-1], strict=True):
        last += 1
        limit = aim = start + bottleneck
        if goal < aim:
            aim = goal
        if low > aim:
            aim = low
        if prefix[last] < aim:  # beyond it, some of the rest would be empty
            aim = prefix[last]
        first = end + 1
        # Most ends are close, where the processor has the sums in its cache; a gate may be wide.
        stop = first + near
        if stop > last:
            stop = last
        end = bisect_left(prefix, aim, first, stop)
        if end == stop < last:
            end = bisect_left(prefix, aim, end, last)
        start, before = prefix[end], prefix[end - 1]
        if end > first and before >= low and (start > limit or goal - before <= start - goal):
            end, start = end - 1, before
            if prefix[end - 1] == start:
                end = bisect_left(prefix, start, first, end)
        ends.append(end)
    return [*ends, n]


def _near_by_looks(prefix: list[Any], bottleneck: Any, lowest: list[Any], goals: list[Any]) -> list[int]:
    n, blocks = len(prefix) - 1, len(goals) - 1
    ends, end, start, edge = [0], 0, prefix[0], 0
    lasts = islice(prefix, n - blocks + 1, n)
    for low, goal, last in zip(islice(lowest, 1, blocks), islice(goals, 1, blocks), lasts, strict=True):
        limit = aim = start + bottleneck
        if goal < aim:
            aim = goal
        if low > aim:
            aim = low
        if last < aim:
            aim = last
        before = start
        end += 1
        start = prefix[end]
        if start < aim:
            first = end
            if end < edge:
                end = edge  # without another look at layers of zero
            while start < aim:
                before = start
                end += 1
                start = prefix[end]
            if before >= low and (start > limit or goal - before <= start - goal):
                end, start = end - 1, before
                if prefix[end - 1] == start:
                    edge = end
                    end = bisect_left(prefix, start, first, end)
        ends.append(end)
    ends.append(n)
    return ends


def heights_of(turns: list[tuple[int, int]], origin: float, unit: float) -> list[float]:
    """Heights at 0, 1, 2, … of the string with these bends, in units above the origin; rounded."""
    heights = [origin]
    for (at, start), (turn, goal) in pairwise(turns):
        rise = (goal - start) * unit / (turn - at)
        heights[-1:] = accumulate(repeat(rise, turn - at), initial=origin + start * unit)
    return heights


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
    return tuple(map(sub, islice(ends, 1, None), ends))
