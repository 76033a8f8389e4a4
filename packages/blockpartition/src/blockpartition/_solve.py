"""Partition a sequence into blocks, without stages or constraints."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

from ._arguments import block_count, choice
from ._even import most_even, near_even
from ._numbers import Grid, read, to_list
from ._results import Partition
from ._search import least_bottleneck, witness

T = TypeVar("T")

_TIE_BREAKS = {"quantile": near_even, "exact": most_even}


def solve(sequence: Iterable[T], partitions: int = 1) -> list[list[T]]:
    """Split a sequence into contiguous, non-empty blocks whose largest sum is minimal.

    The result is exact and deterministic. Reading the costs takes O(n), and each bisection step about O(k log n).

    Args:
        sequence: the costs: ints, floats or Fractions, finite and not negative.
        partitions: the number of blocks, from 1 to the number of costs.

    Returns:
        The blocks, as lists of the items themselves.

    Raises:
        TypeError: an item is not a number, or `partitions` is not an int.
        ValueError: an item is negative or not finite, there are no items, or there are fewer than `partitions`.

    >>> solve([1, 2, 3, 4, 5, 6], 2)
    [[1, 2, 3, 4], [5, 6]]
    """
    items = to_list(sequence, "sequence")
    _, _, _, ends = _cut(items, partitions, "sequence", "quantile")
    return [items[start:end] for start, end in pairwise(ends)]


def partition(costs: Iterable[Any], partitions: int, *, even: Literal["quantile", "exact"] = "quantile") -> Partition:
    """Partition costs like `solve`, and return the block sizes and loads with a proof of optimality.

    Args:
        costs, partitions: as for `solve`.
        even: how to choose among the optimal partitions: "quantile" quickly finds nearly even loads, and "exact"
            minimizes the sum of squared loads, in about twenty passes over the layers.

    Returns:
        The sizes and loads of the blocks (in the unit of the costs), and a proof that `verify` checks.

    Raises:
        TypeError: as for `solve`.
        ValueError: as for `solve`, or `even` is unknown.

    >>> partition([1, 2, 3, 4, 5, 6], 3).sizes
    (3, 2, 1)
    """
    tie_break = choice(even, "even", _TIE_BREAKS)
    grid, prefix, bottleneck, ends = _cut(to_list(costs, "costs"), partitions, "costs", tie_break)
    return describe(grid, prefix, ends, witness(prefix, bottleneck, len(ends) - 1))


def _cut(costs: list[Any], partitions: int, name: str, tie_break: str) -> tuple[Grid, list[int], int, list[int]]:
    """Return the costs as integers, their prefix sums, the minimum bottleneck, and the block ends with a leading 0."""
    blocks = block_count(partitions, "partitions", len(costs))
    grid = read(costs, name)
    prefix = list(accumulate(grid.units, initial=0))
    bottleneck = least_bottleneck(prefix, max(grid.units), blocks)
    return grid, prefix, bottleneck, _TIE_BREAKS[tie_break](prefix, bottleneck, blocks)


def describe(costs: Grid, prefix: list[int], ends: list[int], proof: tuple[int, ...]) -> Partition:
    """Build the partition with these block ends, which have a leading 0; `prefix` are the prefix sums of the costs."""
    loads = [prefix[end] - prefix[start] for start, end in pairwise(ends)]
    total, bottleneck, blocks = prefix[-1], max(loads), len(loads)
    bound = max(Fraction(total, blocks), Fraction(max(costs.units)))
    return Partition(
        sizes=tuple(end - start for start, end in pairwise(ends)),
        loads=tuple(map(costs.value, loads)),
        bottleneck=costs.value(bottleneck),
        lower_bound=costs.value(bound),
        imbalance=float(Fraction(bottleneck * blocks, total)) if total else 1.0,
        witness=proof,
    )
