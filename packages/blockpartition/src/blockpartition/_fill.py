"""Blocks filled up to a bound, from either side: what the search does again and again, and where its time goes.

What is found are heights, the sums of all costs before an end: positions would take twice as long, and only the last
step needs them. Heights and bounds are ints or floats, whose differences are exact (see `Sums`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

_SHORT = 16  # layers of a block; a bisection takes about as long as a look at so many


def fill(prefix: list[Any], bound: Any, blocks: int, slack: Any = 0) -> tuple[list[Any], Any, list[tuple[Any, Any]]]:
    """Heights of the ends of blocks filled up to the bound from the left; no layer may exceed it.

    Returns:
        As many heights as blocks, the total where nothing is left; a sum above the bound: with any bound below it these
        blocks would be the same; and start and sum of each block that lacks less than `slack` of the bound.
    """
    found = scan(prefix, bound, slack) if _are_short(prefix, blocks) else _bisect(prefix, bound, blocks, slack)
    heights, over, full = found
    start = heights[-1] if heights else prefix[0]
    if prefix[-1] - start > bound - slack:
        full.append((start, prefix[-1] - start))
    heights += [prefix[-1]] * (blocks - len(heights))
    del heights[blocks:]
    return heights, bound + over, full


def fill_back(prefix: list[Any], bound: Any, blocks: int) -> list[Any]:
    """Heights, in order, of the starts of blocks filled up to the bound from the right, and of their end."""
    heights = _scan_back(prefix, bound) if _are_short(prefix, blocks) else _bisect_back(prefix, bound, blocks)
    heights += [prefix[0]] * (blocks + 1 - len(heights))
    return heights[blocks::-1]


def window(prefix: list[Any], blocks: int) -> int:
    """Layers behind an end among which the next is looked for first: there the processor has the sums in its cache."""
    return 4 * len(prefix) // blocks


def _are_short(prefix: list[Any], blocks: int) -> bool:
    """Whether blocks have so few layers that a look at each is the quickest."""
    return len(prefix) <= _SHORT * blocks


def scan(prefix: list[Any], bound: Any, slack: Any = 0) -> tuple[list[Any], Any, list[tuple[Any, Any]]]:
    """As `fill` by a look at each layer: of all blocks but the last, and with what was too much of the bound."""
    heights: list[Any] = []
    full: list[tuple[Any, Any]] = []
    before = prefix[0]
    limit, over = before + bound, prefix[-1] - before + 1
    for height in prefix:
        if height > limit:
            heights.append(before)
            if height - limit < over:
                over = height - limit
            if limit - before < slack:
                start = limit - bound
                full.append((start, before - start))
            limit = before + bound
        before = height
    return heights, over, full


def _scan_back(prefix: list[Any], bound: Any) -> list[Any]:
    before = prefix[-1]
    heights, limit = [before], before - bound
    for height in reversed(prefix):
        if height < limit:
            heights.append(before)
            limit = before - bound
        before = height
    return heights


def _bisect(prefix: list[Any], bound: Any, blocks: int, slack: Any) -> tuple[list[Any], Any, list[tuple[Any, Any]]]:
    """By a bisection for each block."""
    heights: list[Any] = []
    full: list[tuple[Any, Any]] = []
    end, limit, over = 0, prefix[0] + bound, prefix[-1] - prefix[0] + 1
    near, size = window(prefix, blocks), len(prefix)
    for _ in range(blocks):
        stop = end + near
        if stop > size:
            stop = size
        end = bisect_right(prefix, limit, end, stop)
        if end == stop:
            end = bisect_right(prefix, limit, end)
            if end == size:
                break
        if prefix[end] - limit < over:
            over = prefix[end] - limit
        end -= 1
        height = prefix[end]
        heights.append(height)
        if limit - height < slack:
            start = limit - bound
            full.append((start, height - start))
        limit = height + bound
    return heights, over, full


def _bisect_back(prefix: list[Any], bound: Any, blocks: int) -> list[Any]:
    start, heights, near = len(prefix) - 1, [prefix[-1]], window(prefix, blocks)
    for _ in range(blocks):
        limit, stop = prefix[start] - bound, max(0, start - near)
        start = bisect_left(prefix, limit, stop, start)
        if start == stop:
            start = bisect_left(prefix, limit, 0, stop)
        heights.append(prefix[start])
    return heights
