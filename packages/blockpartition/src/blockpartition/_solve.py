"""One bottleneck for all: plain blocks, whose order and number is all there is to them."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, TypeVar

from ._arguments import block_count, choice
from ._certificate import witness
from ._even import near_even, prefix_sums, sizes_of
from ._exact import least_bottleneck
from ._grid import Grid, listed, read
from ._partition import Partition
from ._squares import most_even
from ._uncollected import uncollected

T = TypeVar("T")

_TIE_BREAKS = {"quantile": near_even, "exact": most_even}


def solve(sequence: Iterable[T], partitions: int = 1) -> list[list[T]]:
    """Contiguous, non-empty blocks in order whose largest sum is the least possible.

    Exact for ints, floats and Fractions, and deterministic. O(n) to read, then about k log n a step of a bisection.

    Args:
        sequence: the costs: ints, floats or Fractions, finite and not negative.
        partitions: how many blocks, from 1 to as many as there are costs.

    Returns:
        The blocks, as lists of the items themselves.

    Raises:
        TypeError: an item that is no number, or `partitions` that is no int.
        ValueError: an item that is negative or not finite, no items, or more blocks than items.

    >>> solve([1, 2, 3, 4, 5, 6], 2)
    [[1, 2, 3, 4], [5, 6]]
    """
    items = listed(sequence, "sequence")
    ends = _ends(items, partitions)
    with uncollected():
        return [items[start:end] for start, end in pairwise(ends)]


def _ends(items: list[Any], partitions: int) -> list[int]:
    grid = read(items, "sequence")
    blocks = block_count(partitions, "partitions", len(items))
    prefix = prefix_sums(grid.units)
    return near_even(prefix, *least_bottleneck(grid.units, prefix, blocks))


def partition(costs: Iterable[Any], partitions: int, *, even: Literal["quantile", "exact"] = "quantile") -> Partition:
    """The blocks of `solve` with their loads, bounds and proof.

    Of all partitions with the least bottleneck, `even="quantile"` takes one with nearly even loads in no time,
    `even="exact"` one with the least sum of squared loads: in little time where few ends come into question, else in
    some twenty looks at each layer.

    Args:
        costs: of the layers, in any unit: ints, floats or Fractions, finite and not negative.
        partitions: how many blocks, from 1 to as many as there are costs.
        even: how to choose among the optima.

    Returns:
        The blocks' sizes and loads (in the unit of the costs) with the proof that `verify` checks.

    Raises:
        TypeError: a cost that is no number, or `partitions` that is no int.
        ValueError: a cost that is negative or not finite, no costs, more blocks than costs, or another `even`.

    >>> partition([1, 2, 3, 4, 5, 6], 3).sizes
    (3, 2, 1)
    """
    choose = _TIE_BREAKS[choice(even, "even", _TIE_BREAKS)]
    grid = read(costs)
    blocks = block_count(partitions, "partitions", len(grid.units))
    prefix = prefix_sums(grid.units)
    bottleneck, highest = least_bottleneck(grid.units, prefix, blocks)
    return _describe(grid, prefix, choose(prefix, bottleneck, highest), bottleneck)


def _describe(grid: Grid, prefix: list[int], ends: list[int], bottleneck: int) -> Partition:
    blocks, total = len(ends) - 1, prefix[-1]
    bound = max(Fraction(total, blocks), Fraction(max(grid.units)))
    return Partition(
        sizes=sizes_of(ends),
        loads=grid.values([prefix[end] - prefix[start] for start, end in pairwise(ends)]),
        bottleneck=grid.value(bottleneck),
        lower_bound=grid.value(bound.numerator, bound.denominator),
        imbalance=bottleneck * blocks / total if total else 1.0,
        witness=witness(prefix, blocks, bottleneck),
    )
