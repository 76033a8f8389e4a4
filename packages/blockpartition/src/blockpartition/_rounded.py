"""Whether what was found by rounded sums is the optimum of the costs themselves, exactly."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from fractions import Fraction
from itertools import compress, count, islice, pairwise, repeat
from operator import ge, sub
from typing import Any

from ._sums import Sums, exact_sum

_FEW = 64  # sums to add up exactly, at least; more of them take longer than they are worth


def largest_sum(costs: list[Any], sums: Sums, bottleneck: int, ends: list[int]) -> int | Fraction | None:
    """The largest exact sum of these blocks, which come up to the bottleneck; None if too many of them may have it."""
    heights = list(map(sums.prefix.__getitem__, ends))
    loads = map(sub, islice(heights, 1, None), heights)
    least = (bottleneck - 2 * sums.error) * sums.unit
    heavy = list(compress(count(), map(ge, loads, repeat(least))))
    if _are_many(heavy, costs):
        return None
    return max(exact_sum(costs[ends[j] : ends[j + 1]]) for j in heavy)


def is_least(costs: list[Any], sums: Sums, bottleneck: int, largest: int | Fraction | None) -> bool:
    """Whether as many blocks, all of them smaller than `largest`, certainly hold less than all.

    Each is filled from the left as far as rounded sums stay below the bottleneck. If with the next layer each has no
    less than `largest`, smaller blocks never reach further than these.

    bottleneck: the least possible for the rounded sums.
    """
    if largest is None or bottleneck <= sums.heaviest:
        return bool(largest == max(costs))
    reach = (1 + 2 * sums.error) * sums.unit
    close = _close_beyond(sums.prefix, (bottleneck - 1) * sums.unit, reach)
    return not _are_many(close, costs) and all(
        exact_sum(costs[start:end]) >= largest for start, end in _positions(sums.prefix, close)
    )


def is_witness(
    costs: list[Any], sums: Sums, witness: tuple[int, ...], bottleneck: int, largest: int | Fraction
) -> bool:
    """Whether blocks up to these ends, each with one more layer, certainly have no less than `largest`.

    By rounded sums they have no less than the bottleneck, which is the least possible.
    """
    if sums.error == 0:
        return True
    prefix, reach = sums.prefix, (bottleneck + 2 * sums.error) * sums.unit
    different = witness[: witness.index(witness[-1]) + 2]  # behind a layer that is too heavy all of them are the same
    close = {(start, end + 1) for start, end in pairwise((0, *different)) if prefix[end + 1] - prefix[start] <= reach}
    return not _are_many(close, costs) and all(exact_sum(costs[start:end]) >= largest for start, end in close)


def _close_beyond(prefix: list[Any], bound: Any, reach: Any) -> list[tuple[Any, Any]]:
    """Blocks filled up to the bound from the left, with the layer that was too much by no more than `reach`.

    Heights of their starts and of their ends.
    """
    close = []
    start = before = prefix[0]
    limit = start + bound
    for height in prefix:
        if height > limit:
            if height - limit <= reach:
                close.append((start, height))
            start = before
            limit = before + bound
        before = height
    return close


def _positions(prefix: list[Any], heights: Iterable[tuple[Any, Any]]) -> list[tuple[int, int]]:
    """From the last position with the one height to the first with the other: between them is the least."""
    return [(bisect_right(prefix, start) - 1, bisect_left(prefix, end)) for start, end in heights]


def _are_many(found: Collection[Any], costs: list[Any]) -> bool:
    return len(found) > _FEW + len(costs) // _FEW
