"""Blocks filled up to one bound after another: what a new bound leaves as it was is not filled again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import chain, compress, count, repeat
from operator import gt, sub
from typing import Any, NamedTuple

from ._fill import fill, window
from ._sums import Sums

_FEW = 128  # to fill one of so many blocks anew, and those behind it, takes as long as to fill all


class Filled(NamedTuple):
    """Blocks filled up to a bound from the left.

    heights: of their ends, the total where nothing is left; of the last alone, if they do not hold everything.
    complete: whether they hold everything.
    limit: a bound, in units: if complete, one that they keep too; if not, one below which nothing is complete.
    """

    heights: list[Any]
    complete: bool
    limit: int


@dataclass
class _Whole:
    """Blocks that hold everything.

    heights: of their ends.
    bound: up to which they were filled.
    floor: what only the loose blocks exceed.
    loose: the starts and the loads of these, in order.
    loads: of all blocks, where they are known.
    """

    heights: list[Any]
    bound: Any
    floor: Any
    loose: list[tuple[Any, Any]] = field(default_factory=list)
    loads: list[Any] = field(default_factory=list)


class _Part(NamedTuple):
    """Some heights of a list, which are copied only once they are needed."""

    heights: list[Any]
    start: int
    end: int


class Fills:
    """Blocks filled up to ever other bounds.

    A bound that is a little lower changes few blocks, and those behind them until an end is where it was. Only these
    are filled anew. All that follow are the same, but for their numbers.
    """

    def __init__(self, sums: Sums, blocks: int) -> None:
        self._sums, self._blocks = sums, blocks
        self._near = window(sums.prefix, blocks)
        self._whole: _Whole | None = None

    def fill(self, bound: int) -> Filled:
        """As many blocks as there are, up to this bound in units; no layer may exceed it."""
        height = bound * self._sums.unit
        if self._whole is not None and self._changes_few(self._whole, height):
            return self._fill_again(self._whole, height)
        return self._fill(height)

    def _fill(self, bound: Any) -> Filled:
        total = self._sums.prefix[-1]
        heights, above = fill(self._sums.prefix, bound, self._blocks)
        if heights[-1] < total:
            return Filled(heights[-1:], False, self._sums.length(above))
        ends = heights[: bisect_left(heights, total) + 1]
        loads = self._loads(ends)
        if len(ends) > _FEW:
            self._whole = _Whole(ends, bound, bound, loads=loads)
        return Filled(heights, True, self._sums.length(max(loads)))

    def _loads(self, ends: list[Any]) -> list[Any]:
        return list(map(sub, ends, chain(self._sums.prefix[:1], ends)))

    def _changes_few(self, whole: _Whole, bound: Any) -> bool:
        if bound > whole.bound:
            return False
        if bound < whole.floor:  # further down, for bounds to come
            whole.floor = bound - (whole.bound - bound)
            loads = whole.loads or self._loads(whole.heights)
            are_loose = map(gt, loads, repeat(whole.floor))
            whole.loose = [(self._start(whole, j), loads[j]) for j in compress(count(), are_loose)]
        changed: int = sum(load > bound for _, load in whole.loose)
        return _FEW * changed < len(whole.heights)

    def _start(self, whole: _Whole, j: int) -> Any:
        return whole.heights[j - 1] if j else self._sums.prefix[0]

    def _fill_again(self, whole: _Whole, bound: Any) -> Filled:
        total, old = self._sums.prefix[-1], whole.heights
        new = _Whole([], bound, whole.floor)
        passed, copied, above = self._sums.prefix[0], 0, total - self._sums.prefix[0]
        parts: list[_Part] = []
        for start, load in whole.loose:
            if start < passed:
                continue
            if load <= bound:
                new.loose.append((start, load))
                continue
            at = 0 if start == self._sums.prefix[0] else bisect_left(old, start) + 1
            parts.append(_Part(old, copied, at))
            passed, copied, least = self._catch_up(new, old, start, at)
            above = min(above, least)
            parts.append(_Part(new.heights, 0, len(new.heights)))
            new.heights = []
        parts.append(_Part(old, copied, len(old)))
        missing = self._blocks - sum(part.end - part.start for part in parts)
        if missing < 0:
            return Filled([_nth(parts, self._blocks - 1)], False, self._sums.length(above))
        for part in parts:
            new.heights += part.heights[part.start : part.end]
        self._whole = new
        largest = max((load for _, load in new.loose), default=new.floor)
        return Filled(new.heights + [total] * missing, True, self._sums.length(largest))

    def _catch_up(self, new: _Whole, old: list[Any], start: Any, at: int) -> tuple[Any, int, Any]:
        """Fill blocks from this start, where the old ends go on with number `at`, until one ends as an old one does.

        Returns:
            Where that is, the number of the old end behind it, and the smallest sum that was too much for a block.
        """
        prefix, total, near = self._sums.prefix, self._sums.prefix[-1], self._near
        end, above, size = bisect_right(prefix, start) - 1, total - prefix[0], len(prefix)
        while True:
            limit, stop = start + new.bound, end + near
            if stop > size:
                stop = size
            end = bisect_right(prefix, limit, end, stop)
            if end == stop:
                end = bisect_right(prefix, limit, stop)
            end -= 1
            height = prefix[end]
            new.heights.append(height)
            if height - start > new.floor:
                new.loose.append((start, height - start))
            if height < total and prefix[end + 1] - start < above:
                above = prefix[end + 1] - start
            at = bisect_left(old, height, at)
            if old[at] == height:
                return height, at + 1, above
            start = height


def _nth(parts: list[_Part], n: int) -> Any:
    for heights, start, end in parts:
        if n < end - start:
            return heights[start + n]
        n -= end - start
    raise IndexError
