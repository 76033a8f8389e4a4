"""Blocks filled up to one bound after another: what a new bound leaves as it was is not filled again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import sub
from typing import Any, NamedTuple

from ._fill import fill, window
from ._sums import Sums

_FEW = 128  # to fill one of so many blocks anew, and those behind it, takes as long as to fill all
_MOVES = 16  # times that all heights behind a place are moved, which take as long as to make a new list


class Filled(NamedTuple):
    """Blocks filled up to a bound from the left.

    heights: of their ends up to the total, fewer than blocks where some are left; of the last alone, if they do not
        hold everything. Good until the next bound is tried.
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
    """

    heights: list[Any]
    bound: Any
    floor: Any
    loose: list[tuple[Any, Any]]


class _Patch(NamedTuple):
    """Heights in place of those from number `start` to before number `end`."""

    start: int
    end: int
    heights: list[Any]

    @property
    def more(self) -> int:
        """How many more heights there are with it."""
        return len(self.heights) - (self.end - self.start)


class Fills:
    """Blocks filled up to ever other bounds.

    A bound that is a little lower changes few blocks, and those behind them until an end is where it was. Only these
    are filled anew. All that follow are the same, but for their numbers.
    """

    def __init__(self, sums: Sums, blocks: int, slack: int = 0) -> None:
        self._sums, self._blocks, self._slack = sums, blocks, slack * sums.unit
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
        heights, above, loose = fill(self._sums.prefix, bound, self._blocks, self._slack)
        if heights[-1] < total:
            return Filled(heights[-1:], False, self._sums.length(above))
        del heights[bisect_left(heights, total) + 1 :]
        whole = _Whole(heights, bound, bound - self._slack, loose)
        if len(heights) > _FEW:
            self._whole = whole
        return Filled(heights, True, self._limit(whole))

    def _limit(self, whole: _Whole) -> int:
        loads = [load for _, load in whole.loose] or self._loads(whole.heights)
        return self._sums.length(max(loads))

    def _loads(self, heights: list[Any]) -> Iterator[Any]:
        return map(sub, heights, chain(self._sums.prefix[:1], heights))

    def _changes_few(self, whole: _Whole, bound: Any) -> bool:
        if bound > whole.bound:
            return False
        if bound < whole.floor:  # further down, for bounds to come
            whole.floor = bound - (whole.bound - bound)
            starts = chain(self._sums.prefix[:1], whole.heights)
            loads = zip(starts, self._loads(whole.heights), strict=False)
            whole.loose = [(start, load) for start, load in loads if load > whole.floor]
        changed: int = sum(load > bound for _, load in whole.loose)
        return _FEW * changed < len(whole.heights)

    def _fill_again(self, whole: _Whole, bound: Any) -> Filled:
        total, old = self._sums.prefix[-1], whole.heights
        new = _Whole([], bound, whole.floor, [])
        passed, above = self._sums.prefix[0], total - self._sums.prefix[0]
        patches: list[_Patch] = []
        for start, load in whole.loose:
            if start < passed:
                continue
            if load <= bound:
                new.loose.append((start, load))
                continue
            at = 0 if start == self._sums.prefix[0] else bisect_left(old, start) + 1
            new.heights = []
            passed, end, least = self._catch_up(new, old, start, at)
            above = min(above, least)
            patches.append(_Patch(at, end, new.heights))
        if len(old) + sum(patch.more for patch in patches) > self._blocks:
            return Filled([_nth(old, patches, self._blocks - 1)], False, self._sums.length(above))
        new.heights = _patched(old, patches)
        self._whole = new
        return Filled(new.heights, True, self._limit(new))

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


def _nth(old: list[Any], patches: list[_Patch], n: int) -> Any:
    """The n-th height of the patched list."""
    for patch in patches:
        if n < patch.start + len(patch.heights):
            return old[n] if n < patch.start else patch.heights[n - patch.start]
        n -= patch.more
    return old[n]


def _patched(old: list[Any], patches: list[_Patch]) -> list[Any]:
    """The heights with the patches, which are in order: the same list where few of these change their number."""
    if sum(patch.more != 0 for patch in patches) <= _MOVES:
        for patch in reversed(patches):
            old[patch.start : patch.end] = patch.heights
        return old
    new: list[Any] = []
    copied = 0
    for patch in patches:
        new += old[copied : patch.start]
        new += patch.heights
        copied = patch.end
    return new + old[copied:]
