"""Verify a partition independently: re-read the costs and never call the solver."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil
from typing import Any, Literal

from ._arguments import integer, integers
from ._numbers import Number, ratio, read, to_list
from ._place import build_placement
from ._problem import PlacedBlock, Problem, makespan, slowest
from ._read import read_problem
from ._results import Partition, Placement
from ._solve import describe
from ._stages import Stage


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
    """Check that a partition is valid for these costs and provably optimal.

    The solver is not used. The witness proves a plain partition, in O(k) after the prefix sums. For a placement, a
    simple dynamic program over all cuts shows that no faster blocks exist, in O(k n²) at most.

    Args:
        partition: a result of `partition` or `place`.
        costs: the costs of the layers.
        stages: the stages, for a placement.
        partitions: the expected number of blocks; not checked by default.
        objective: the objective of the placement.
        gap: the acceptable relative distance of a makespan from the optimum.
        constraints: the remaining arguments of `place`.

    Raises:
        TypeError: an argument, or a field of the partition, has the wrong type.
        ValueError: the partition is invalid or not proven optimal, or a field is wrong. The message gives the reason.

    >>> from blockpartition import partition
    >>> verify(partition([1, 2, 3], 2), [1, 2, 3])
    """
    if not isinstance(partition, Partition):
        raise TypeError(f"partition must be a Partition, got {partition!r} of type {type(partition).__name__}")
    sizes = integers(partition.sizes, "sizes", 1)
    if partitions is not None and integer(partitions, "partitions", 1) != len(sizes):
        raise ValueError(f"expected {partitions} blocks, got {len(sizes)}")
    if isinstance(partition, Placement):
        if stages is None:
            raise TypeError("a placement is verified with the arguments of place(), but stages is missing")
        problem = read_problem(costs, stages, objective=objective, **constraints)
        return _check_placement(partition, sizes, problem, objective, ratio(gap, "gap"))
    if stages is not None or constraints or objective != "bottleneck":
        raise TypeError("a plain partition has no stages, constraints or objective; only results of place() do")
    return _check_partition(partition, sizes, costs)


def _check_partition(partition: Partition, sizes: list[int], costs: Iterable[Any]) -> None:
    grid = read(costs)
    prefix, ends = list(accumulate(grid.units, initial=0)), _ends(sizes, len(grid.units))
    witness = integers(partition.witness, "witness", 0)
    _check_fields(partition, describe(grid, prefix, ends, tuple(witness)))
    if len(witness) != len(sizes):
        raise ValueError(f"the witness must have one end per block ({len(sizes)}), got {len(witness)}")
    # The stored bottleneck may be a rounded float, but the proof needs the exact value.
    bottleneck = max(prefix[end] - prefix[start] for start, end in pairwise(ends))
    for j, (start, end) in enumerate(pairwise([0, *witness])):
        if not start <= end < len(grid.units):
            raise ValueError(f"witness[{j}] must be in {start} … {len(grid.units) - 1}, got {end!r}")
        if prefix[end + 1] - prefix[start] < bottleneck:
            raise ValueError(f"witness[{j}] proves nothing: layers {start} … {end} together are below the bottleneck")


def _check_placement(placement: Placement, sizes: list[int], problem: Problem, objective: str, gap: Fraction) -> None:
    blocks, m = _blocks(placement, sizes, problem), problem.microbatches or 1
    stated = ratio(placement.gap, "gap")
    _check_fields(placement, build_placement(problem, blocks, placement.gap))
    if stated > (gap if objective == "makespan" else 0):
        raise ValueError(f"gap is {placement.gap}, more than {gap}")
    if objective == "makespan":
        _check_makespan(problem, m, makespan(blocks, m) / (1 + stated))
    elif _least_latency(problem, slowest(blocks) - 1) is not None:
        raise ValueError("faster blocks are possible on these stages")


def _blocks(placement: Placement, sizes: list[int], problem: Problem) -> list[PlacedBlock]:
    """Convert the placement to blocks of the problem, or raise ValueError if it violates a constraint."""
    ends, modes = _ends(sizes, len(problem.costs.units)), to_list(placement.modes, "modes")
    if not len(sizes) == len(modes) == len(problem.slots):
        raise ValueError(f"expected {len(problem.slots)} blocks and modes, got {len(sizes)} and {len(modes)}")
    if forbidden := set(ends) - set(problem.positions):
        raise ValueError(f"cut {min(forbidden)} is forbidden")
    if missed := {problem.positions[pin] for pin in problem.pins} - set(ends):
        raise ValueError(f"cut {min(missed)} is pinned, but a block crosses it")
    blocks, at = list[PlacedBlock](), {layer: position for position, layer in enumerate(problem.positions)}
    for j, (first, last) in enumerate(pairwise(ends)):
        slot = next((slot for slot in problem.slots[j] if slot.mode == modes[j]), None)
        if slot is None:
            raise ValueError(f"stage {j} has no mode {modes[j]!r}")
        blocks.append(PlacedBlock(at[first], at[last], slot))
        if slot.need.of(at[first], at[last]) > slot.room:
            raise ValueError(f"layers {first} to {last - 1} do not fit on their stage")
    return blocks


def _check_makespan(problem: Problem, m: int, value: Fraction) -> None:
    limit = problem.infinite
    while (least := _least_latency(problem, limit - 1)) is not None:
        if least + (m - 1) * (limit - 1) < value:  # an upper bound on the makespan of the blocks with this latency
            raise ValueError("blocks that finish earlier are possible on these stages")
        # No blocks finish earlier if their slowest block takes at least the new limit, but less than the old one.
        limit = ceil((value - least) / (m - 1)) if m > 1 else 0


def _least_latency(problem: Problem, limit: int) -> int | None:
    """Return the minimum sum of times within the limit, by trying all starts of each block; None if infeasible."""
    before: dict[int, int] = {0: 0}
    for modes in problem.slots:
        table: dict[int, int] = {}
        for slot in modes:
            # The time of a block is a term of its end minus a term of its start.
            known = {start: latency - slot.time.prefix[start] for start, latency in before.items()}
            for end in range(1, problem.n + 1):
                starts = range(problem.first_start(slot, end, limit), end)
                if found := [known[start] for start in starts if start in known]:
                    latency = min(found) + slot.time.upto[end]
                    table[end] = min(latency, table.get(end, latency))
        before = table
    return before.get(problem.n)


def _ends(sizes: list[int], layers: int) -> list[int]:
    """Return the ends of these blocks with a leading 0, or raise ValueError unless they cover all layers."""
    if sum(sizes) != layers:
        raise ValueError(f"the sizes sum to {sum(sizes)!r} layers, but there are {layers} costs")
    return list(accumulate(sizes, initial=0))


def _check_fields(result: Partition, expected: Partition) -> None:
    """Raise ValueError unless every field has the expected value. Lists may replace tuples, as in JSON."""
    for field in fields(expected):
        said, value = getattr(result, field.name), getattr(expected, field.name)
        if (tuple(said) if isinstance(said, list) else said) != value:
            raise ValueError(f"{field.name} should be {value}, but the result has {said}")
