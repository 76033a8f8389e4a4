"""Partitions into blocks without stages and constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import islice, pairwise
from math import fsum
from operator import sub
from typing import Any, Literal, TypeVar

from ._arguments import block_count, choice
from ._certificate import witness
from ._even import near_even, sizes_of
from ._exact import least_bottleneck
from ._grid import Grid, Number, listed, number, read
from ._partition import Partition
from ._rounded import is_least, is_witness, largest_sum
from ._squares import most_even
from ._sums import Sums, exact_sum, exact_sums, quick_sums
from ._uncollected import uncollected

T = TypeVar("T")

_MANY = 500  # costs for which adding as floats, and adding some again exactly, is faster
_LONG = 16  # layers of a block: longer ones are filled as quickly with sums that are ints

_TIE_BREAKS = {"quantile": near_even, "exact": most_even}


def solve(sequence: Iterable[T], partitions: int = 1) -> list[list[T]]:
    """Contiguous, non-empty blocks in order whose largest sum is minimal.

    The result is exact for ints, floats and Fractions, and deterministic. It takes O(n) to read the costs, and then
    about k log n for each step of a bisection.

    Args:
        sequence: the costs: ints, floats or Fractions, finite and not negative.
        partitions: the number of blocks, from 1 to the number of costs.

    Returns:
        The blocks, as lists of the items themselves.

    Raises:
        TypeError: an item is not a number, or `partitions` is not an int.
        ValueError: an item is negative or not finite, there are no items, or fewer than `partitions`.

    >>> solve([1, 2, 3, 4, 5, 6], 2)
    [[1, 2, 3, 4], [5, 6]]
    """
    items = listed(sequence, "sequence")
    blocks = block_count(partitions, "partitions", len(items))
    sums = _quick(items, blocks) or exact_sums(read(items, "sequence").units)
    with uncollected():
        if blocks == len(items):
            return [[item] for item in items]
        start = 0
        return [items[start : (start := end)] for end in islice(_ends(items, sums, blocks), 1, None)]


def _quick(costs: list[Any], blocks: int) -> Sums | None:
    """Sums as floats, if these are faster than ints and precise enough."""
    if len(costs) < _MANY or (isinstance(costs[0], int) and _LONG * blocks < len(costs)):
        return None
    return quick_sums(costs)


def _ends(items: list[Any], sums: Sums, blocks: int) -> list[int]:
    bottleneck, highest = least_bottleneck(sums, blocks)
    ends = near_even(sums, bottleneck, highest)
    if sums.error == 0 or is_least(items, sums, bottleneck, largest_sum(items, sums, bottleneck, ends)):
        return ends
    return _ends(items, exact_sums(read(items, "sequence").units), blocks)


def partition(costs: Iterable[Any], partitions: int, *, even: Literal["quantile", "exact"] = "quantile") -> Partition:
    """The blocks of `solve`, with their loads, bounds and proof.

    Of all partitions with the least bottleneck, `even="quantile"` quickly finds one with nearly even loads.
    `even="exact"` finds the one with the least sum of squared loads; that takes longer if there are many optimal
    partitions.

    Args:
        costs: the cost of each layer, in any unit: ints, floats or Fractions, finite and not negative.
        partitions: the number of blocks, from 1 to the number of costs.
        even: how to choose among the optimal partitions.

    Returns:
        The sizes and loads of the blocks (in the unit of the costs), and a proof that `verify` checks.

    Raises:
        TypeError: a cost is not a number, or `partitions` is not an int.
        ValueError: a cost is negative or not finite, there are no costs, or fewer than `partitions`, or `even` is
            unknown.

    >>> partition([1, 2, 3, 4, 5, 6], 3).sizes
    (3, 2, 1)
    """
    choice(even, "even", _TIE_BREAKS)
    numbers = listed(costs, "costs")
    blocks = block_count(partitions, "partitions", len(numbers))
    with uncollected():
        sums = _quick(numbers, blocks) if even == "quantile" or blocks == len(numbers) else None
        quick = sums and _quickly(numbers, sums, blocks)
        return quick or _exactly(read(numbers), blocks, _TIE_BREAKS[even])


def _quickly(costs: list[Any], sums: Sums, blocks: int) -> Partition | None:
    """None if rounded sums cannot tell which blocks are optimal."""
    bottleneck, ends, largest = _chosen(costs, sums, blocks)
    proof = witness(sums.prefix, blocks, bottleneck * sums.unit)
    if largest is None or not is_witness(costs, sums, proof, bottleneck, largest):
        return None
    exact = sums.error == 0
    loads = _loads(sums.prefix, ends) if exact else _loads_of(costs, ends)
    total, heaviest = (sums.total, sums.heaviest) if exact else (exact_sum(costs), max(costs))
    return _described(ends, loads, Fraction(largest), Fraction(total), Fraction(heaviest), type(costs[0]), proof)


def _loads(prefix: list[Any], ends: list[int]) -> tuple[int, ...]:
    heights = list(map(prefix.__getitem__, ends))
    return tuple(map(int, map(sub, islice(heights, 1, None), heights)))


def _loads_of(costs: list[Any], ends: list[int]) -> tuple[Number, ...]:
    add_up = sum if type(costs[0]) is int else fsum
    return tuple([add_up(costs[start:end]) for start, end in pairwise(ends)])


def _chosen(costs: list[Any], sums: Sums, blocks: int) -> tuple[int, list[int], int | Fraction | None]:
    """The bottleneck of the rounded costs, where blocks end, and the largest exact sum of these if that is known."""
    if blocks == len(costs):
        return sums.heaviest, list(range(blocks + 1)), Fraction(max(costs))
    bottleneck, highest = least_bottleneck(sums, blocks)
    ends = near_even(sums, bottleneck, highest)
    return bottleneck, ends, largest_sum(costs, sums, bottleneck, ends) if sums.error else bottleneck


def _exactly(grid: Grid, blocks: int, choose: Callable[[Sums, int, list[Any]], list[int]]) -> Partition:
    sums = exact_sums(grid.units)
    bottleneck, highest = least_bottleneck(sums, blocks)
    ends = choose(sums, bottleneck, highest)
    loads = grid.values([sums.prefix[end] - sums.prefix[start] for start, end in pairwise(ends)])
    largest, total, heaviest = (Fraction(x, grid.scale) for x in (bottleneck, sums.total, sums.heaviest))
    return _described(ends, loads, largest, total, heaviest, grid.kind, witness(sums.prefix, blocks, bottleneck))


def _described(
    ends: list[int],
    loads: tuple[Number, ...],
    largest: Fraction,
    total: Fraction,
    heaviest: Fraction,
    kind: type,
    proof: tuple[int, ...],
) -> Partition:
    bound = max(total / len(loads), heaviest)
    return Partition(
        sizes=sizes_of(ends),
        loads=loads,
        bottleneck=max(loads),
        lower_bound=number(bound.numerator, bound.denominator, kind),
        imbalance=float(largest * len(loads) / total) if total else 1.0,
        witness=proof,
    )
