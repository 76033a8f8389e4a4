"""The proof that no partition is better, and its checker, which shares no code with the solver."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate, islice, pairwise
from typing import Any, Literal

from ._arguments import choice, integer
from ._counted import counted
from ._fields import integers, same
from ._fill import window
from ._grid import Grid, Number, ratio, read, shown
from ._model import read_model
from ._partition import Partition, Placement, check_sizes
from ._placement_certificate import check_placement
from ._stages import Stage

_SHORT = 8  # layers of a block; a bisection takes about as long as looking at that many


def witness(prefix: list[Any], blocks: int, bottleneck: Any) -> tuple[int, ...]:
    """Ends g₁ … g_k of greedy blocks that stay strictly below the bottleneck.

    If every load is below the bottleneck, the j-th block ends at g_j at the latest. So g_k < n proves that such blocks
    cannot cover all n layers.
    """
    ends = (
        _by_looks(prefix, bottleneck) if len(prefix) <= _SHORT * blocks else _by_bisection(prefix, blocks, bottleneck)
    )
    return (*ends[:blocks], *ends[-1:] * (blocks - len(ends)))


def _by_looks(prefix: list[Any], bottleneck: Any) -> list[int]:
    """The ends up to one from which not a single layer stays below the bottleneck."""
    ends = []
    before = prefix[0]
    limit = before + bottleneck
    for end, height in enumerate(islice(prefix, 1, None)):
        if height >= limit:
            ends.append(end)
            limit = before + bottleneck
            if height >= limit:
                break
        before = height
    return ends


def _by_bisection(prefix: list[Any], blocks: int, bottleneck: Any) -> list[int]:
    ends, end, near, size = [], 0, window(prefix, blocks), len(prefix)
    for _ in range(blocks):
        limit, stop = prefix[end] + bottleneck, min(end + near, size)
        beyond = bisect_left(prefix, limit, end, stop)
        if beyond == stop:
            beyond = bisect_left(prefix, limit, stop)
        end = max(end, beyond - 1)
        ends.append(end)
    return ends


def verify(
    partition: Partition,
    costs: Iterable[Any],
    stages: int | Iterable[Stage] | None = None,
    *,
    partitions: int | None = None,
    objective: Literal["bottleneck", "makespan"] = "bottleneck",
    gap: Number = 0,
    **constraints: Any,
) -> None:
    """Check that a partition is valid for these costs and provably optimal; raise ValueError with the reason if not.

    Optimality follows from the partition's witness, in O(k) after the prefix sums; the solver is not used. For a result
    of `place`, pass the arguments of `place` too. Every field is checked: against the costs, or, for the witness and
    the gap, as a proof.

    Args:
        partition: a result of `partition` or `place`.
        costs: the costs of the layers.
        stages: for a placement, the stages.
        partitions: the number of blocks that it should have; not checked if left out.
        objective: the objective of the placement.
        gap: the largest relative distance of a makespan from the optimum.
        constraints: the other arguments of `place`.

    Raises:
        TypeError: an argument, or a field of the partition, has a wrong type.
        ValueError: the partition is invalid, not proven optimal, or a field is wrong.
    """
    if not isinstance(partition, Partition):
        raise TypeError(f"partition must be a Partition, got {shown(partition)} of type {type(partition).__name__}")
    choice(objective, "objective", ["bottleneck", "makespan"])
    slack = Fraction(*ratio(gap, "gap"))
    sizes = integers(partition.sizes, "sizes")
    if partitions is not None and integer(partitions, "partitions", 1) != len(sizes):
        raise ValueError(f"the partition has {counted(len(sizes), 'block')}, {partitions} were asked for")
    if isinstance(partition, Placement):
        if stages is None:
            raise TypeError("a placement is verified with the arguments it was made with: stages is missing")
        return check_placement(partition, read_model(costs, stages, **_known(constraints)), objective, slack)
    if stages is not None or constraints or objective != "bottleneck":
        raise TypeError("a plain partition knows no stages; only what `place` returns does")
    return _check_partition(partition, costs)


def _known(constraints: dict[str, Any]) -> dict[str, Any]:
    """The constraints; TypeError if `place` does not have one of them."""
    unknown = constraints.keys() - inspect.signature(read_model).parameters.keys()
    if unknown:
        raise TypeError(f"verify() got an unexpected keyword argument {min(unknown)!r}")
    return constraints


def _check_partition(partition: Partition, costs: Iterable[Any]) -> None:
    grid = read(costs)
    prefix = [0, *accumulate(grid.units)]
    check_sizes(partition.sizes, len(grid.units))
    _check_loads(partition, grid, prefix)
    _check_witness(partition, prefix)


def _check_loads(partition: Partition, grid: Grid, prefix: list[int]) -> None:
    sums = [prefix[end] - prefix[start] for start, end in pairwise(_ends(partition))]
    total, blocks = prefix[-1], len(sums)
    bound = max(Fraction(total, blocks), Fraction(max(grid.units)))
    loads = tuple(map(grid.value, sums))
    if not same(partition.loads, loads):
        raise ValueError(f"loads are {shown(loads, str)}, the partition says {shown(partition.loads, str)}")
    expected = {
        "bottleneck": max(loads),
        "lower bound": grid.value(bound.numerator, bound.denominator),
        "imbalance": float(Fraction(max(sums) * blocks, total)) if total else 1.0,
        "gap": 0,
    }
    for name, value in expected.items():
        said = getattr(partition, name.replace(" ", "_"))
        if not same(said, value):
            raise ValueError(f"the {name} is {shown(value, str)}, the partition says {shown(said, str)}")


def _check_witness(partition: Partition, prefix: list[int]) -> None:
    n, witness = len(prefix) - 1, integers(partition.witness, "witness")
    # The stored bottleneck may be a rounded float; the proof is about the exact one.
    bottleneck = max(prefix[end] - prefix[start] for start, end in pairwise(_ends(partition)))
    if len(witness) != len(partition.sizes):
        raise ValueError(f"the witness has {len(witness)} ends for {len(partition.sizes)} blocks")
    for j, (start, end) in enumerate(pairwise([0, *witness])):
        if not start <= end < n:
            raise ValueError(f"witness[{j}] is {end}; it has to lie in {start} … {n - 1}")
        if prefix[end + 1] - prefix[start] < bottleneck:
            raise ValueError(f"witness[{j}] proves nothing: layers {start} … {end} together stay below the bottleneck")


def _ends(partition: Partition) -> list[int]:
    return [0, *accumulate(partition.sizes)]
