"""The proof that nothing does better, and its checker, which shares no code with the solver."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, Literal

from ._arguments import choice
from ._grid import Grid, Number, read
from ._model import read_model
from ._partition import Partition, Placement, check_sizes
from ._placement_certificate import check_placement
from ._stages import Stage


def witness(prefix: list[int], blocks: int, bottleneck: int) -> tuple[int, ...]:
    """Ends g₁ … g_k of greedy blocks that stay strictly below the bottleneck.

    Whoever keeps every load below the bottleneck ends the j-th block at g_j at the latest. So g_k < n is a proof that
    nobody covers all n layers that way.
    """
    ends, end = [], 0
    for _ in range(blocks):
        end = max(end, bisect_left(prefix, prefix[end] + bottleneck, end) - 1)
        ends.append(end)
    return tuple(ends)


def verify(
    partition: Partition,
    costs: Iterable[Any],
    stages: int | Iterable[Stage] | None = None,
    *,
    objective: Literal["bottleneck", "makespan"] = "bottleneck",
    gap: Number = 0,
    **constraints: Any,
) -> None:
    """Return if the partition is valid for these costs and provably optimal; raise ValueError with the reason if not.

    Optimality is read off the partition's witness, in O(k) once the prefix sums are there: the solver is not asked.
    What `place` returned is checked with the arguments that `place` was given.
    """
    choice(objective, "objective", ["bottleneck", "makespan"])
    if isinstance(partition, Placement):
        if stages is None:
            raise TypeError("a placement is verified with the arguments it was made with: stages is missing")
        return check_placement(partition, read_model(costs, stages, **constraints), objective, Fraction(gap))
    if stages is not None or constraints:
        raise TypeError("a plain partition knows no stages; only what `place` returns does")
    return _check_partition(partition, costs)


def _check_partition(partition: Partition, costs: Iterable[Any]) -> None:
    grid = read(costs)
    prefix = [0, *accumulate(grid.units)]
    check_sizes(partition.sizes, len(grid.units))
    _check_loads(partition, grid, prefix)
    _check_witness(partition, prefix)


def _check_loads(partition: Partition, grid: Grid, prefix: list[int]) -> None:
    loads = tuple(grid.value(prefix[end] - prefix[start]) for start, end in pairwise(_ends(partition)))
    if partition.loads != loads:
        raise ValueError(f"loads are {loads}, the partition says {partition.loads}")
    if partition.bottleneck != max(loads):
        raise ValueError(f"the bottleneck is {max(loads)}, the partition says {partition.bottleneck}")
    blocks, total = len(loads), prefix[-1]
    bound = max(Fraction(total, blocks), Fraction(max(grid.units)))
    expected = grid.value(bound.numerator, bound.denominator)
    if partition.lower_bound != expected:
        raise ValueError(f"the lower bound is {expected}, the partition says {partition.lower_bound}")


def _check_witness(partition: Partition, prefix: list[int]) -> None:
    n, ends = len(prefix) - 1, [0, *partition.witness]
    # The stored bottleneck may be a rounded float: the proof is about the exact one.
    bottleneck = max(prefix[end] - prefix[start] for start, end in pairwise(_ends(partition)))
    if len(partition.witness) != len(partition.sizes):
        raise ValueError(f"the witness has {len(partition.witness)} ends for {len(partition.sizes)} blocks")
    for j, (start, end) in enumerate(pairwise(ends)):
        if not start <= end < n:
            raise ValueError(f"witness[{j}] is {end}; it has to lie in {start} … {n - 1}")
        if prefix[end + 1] - prefix[start] < bottleneck:
            raise ValueError(f"witness[{j}] proves nothing: layers {start} … {end} together stay below the bottleneck")


def _ends(partition: Partition) -> list[int]:
    return [0, *accumulate(partition.sizes)]
