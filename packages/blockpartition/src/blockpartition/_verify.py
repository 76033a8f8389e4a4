"""The checker of partitions: it reads the costs again, and does not call the search."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil
from numbers import Real
from typing import Any, Literal, SupportsIndex

from ._arguments import choice, integer
from ._model import Model, read_model
from ._numbers import Number, counted, ratio, read, shown
from ._problem import ModeSlot, PlacedBlock, Problem, makespan, slowest
from ._results import Partition, Placement
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

    >>> verify(partition([1, 2, 3], 2), [1, 2, 3])
    """
    if not isinstance(partition, Partition):
        raise TypeError(f"partition must be a Partition, got {shown(partition)} of type {type(partition).__name__}")
    choice(objective, "objective", ["bottleneck", "makespan"])
    slack = ratio(gap, "gap")
    sizes = _integers(partition.sizes, "sizes")
    if partitions is not None and integer(partitions, "partitions", 1) != len(sizes):
        raise ValueError(f"the partition has {counted(len(sizes), 'block')}, {partitions} were asked for")
    if isinstance(partition, Placement):
        if stages is None:
            raise TypeError("a placement is verified with the arguments it was made with: stages is missing")
        return _check_placement(partition, sizes, read_model(costs, stages, **constraints), objective, slack)
    if stages is not None or constraints or objective != "bottleneck":
        raise TypeError("a plain partition knows no stages; only what `place` returns does")
    return _check_partition(partition, sizes, costs)


def _check_partition(partition: Partition, sizes: list[int], costs: Iterable[Any]) -> None:
    grid = read(costs)
    prefix, n, k = list(accumulate(grid.units, initial=0)), len(grid.units), len(sizes)
    _check_sizes(sizes, n)
    loads = [prefix[end] - prefix[start] for start, end in pairwise(accumulate(sizes, initial=0))]
    total, bottleneck = prefix[-1], max(loads)
    bound = max(Fraction(total, k), Fraction(max(grid.units)))
    expected = {
        "loads": tuple(map(grid.value, loads)),
        "bottleneck": grid.value(bottleneck),
        "lower_bound": grid.value(bound.numerator, bound.denominator),
        "imbalance": float(Fraction(bottleneck * k, total)) if total else 1.0,
        "gap": 0,
    }
    _check_fields(partition, expected)
    witness = _integers(partition.witness, "witness")
    if len(witness) != k:
        raise ValueError(f"the witness has {len(witness)} ends for {counted(k, 'block')}")
    # The stored bottleneck may be a rounded float; the proof is about the exact one.
    for j, (start, end) in enumerate(pairwise([0, *witness])):
        if not start <= end < n:
            raise ValueError(f"witness[{j}] is {shown(end)}; it has to lie in {start} … {n - 1}")
        if prefix[end + 1] - prefix[start] < bottleneck:
            raise ValueError(f"witness[{j}] proves nothing: layers {start} … {end} together stay below the bottleneck")


def _check_placement(placement: Placement, sizes: list[int], model: Model, objective: str, gap: Fraction) -> None:
    """As for a partition; the proof of a bottleneck takes a look at the ends that the witness denies within reach, that
    of a makespan at all pairs of positions within reach, for each time of the witness.
    """
    m = model.microbatches
    if objective == "makespan" and m is None:
        raise ValueError("a makespan depends on how many micro-batches there are: pass microbatches=…")
    blocks = _blocks(placement, sizes, model)
    sums, ends = list(accumulate(model.costs.units, initial=0)), accumulate(sizes, initial=0)
    expected = {
        "loads": tuple(model.costs.value(sums[end] - sums[start]) for start, end in pairwise(ends)),
        "times": tuple(model.time(block.time) for block in blocks),
        "bottleneck": model.time(slowest(blocks)),
        "lower_bound": model.time(model.lower_bound),
        "imbalance": model.imbalance(slowest(blocks)),
        "makespan": None if m is None else model.time(makespan(blocks, m)),
    }
    _check_fields(placement, expected)
    stated, allowed = ratio(placement.gap, "gap"), gap if objective == "makespan" else Fraction(0)
    if stated > allowed:
        raise ValueError(f"gap is {shown(placement.gap, str)}, more than {shown(allowed, str)}")
    if objective == "makespan" and m is not None:
        _check_thresholds(placement, model, m, makespan(blocks, m) / (1 + stated))
    else:
        _check_reach(placement, model, slowest(blocks) - 1)


def _blocks(placement: Placement, sizes: list[int], model: Model) -> list[PlacedBlock]:
    """The blocks at the positions of the problem, on its slots; ValueError if they break a constraint."""
    k, modes = len(model.problem.slots), _entries(placement.modes, "modes")
    _check_sizes(sizes, len(model.costs.units))
    if not len(sizes) == len(modes) == k:
        raise ValueError(f"{counted(len(sizes), 'block')} and {counted(len(modes), 'mode')} for {counted(k, 'stage')}")
    at, pins, blocks = model.positions, [model.positions[pin] for pin in model.problem.pins], []
    for j, (first, last) in enumerate(pairwise(accumulate(sizes, initial=0))):
        slot = next((slot for slot in model.problem.slots[j] if _same(slot.mode, modes[j])), None)
        if slot is None:
            raise ValueError(f"stage {j} has no mode {shown(modes[j])}")
        start, end = bisect_left(at, first), bisect_left(at, last)
        if at[end] != last:
            raise ValueError(f"cut {last} is forbidden")
        if slot.need.of(start, end) > slot.room:
            raise ValueError(f"layers {first} to {last - 1} do not fit on their stage")
        for pin in pins[bisect_right(pins, first) : bisect_left(pins, last)]:
            raise ValueError(f"cut {pin} is pinned, and a block goes across")
        blocks.append(PlacedBlock(start, end, slot))
    return blocks


def _check_reach(placement: Placement, model: Model, limit: int) -> None:
    """Faster blocks stay within the witness, by induction over the stages, and the witness misses the end."""
    problem, at, witness = model.problem, model.positions, _entries(placement.witness, "witness")
    k, runs = len(problem.slots), [_runs(entry, f"witness[{j}]", at) for j, entry in enumerate(witness)]
    if len(runs) != k + 1:
        raise ValueError(f"the witness is about {len(runs)} numbers of stages, there are {k + 1}")
    if not runs[0] or runs[0][0][0] > 0:
        raise ValueError("the witness does not start at layer 0")
    if runs[-1] and runs[-1][-1][1] == problem.n:
        raise ValueError("the witness reaches the end: it proves nothing")
    for j, modes in enumerate(problem.slots):
        for slot in modes:
            for end in _escapes(problem, runs[j], runs[j + 1], slot, limit):
                if end <= problem.n - k + j + 1:  # further ends leave some of the other stages without a layer
                    raise ValueError(f"the witness denies that a faster block can end at {at[end]}")


def _runs(values: Any, name: str, at: list[int]) -> list[tuple[int, int]]:
    """Intervals of layers as positions of the problem, in order, without overlaps and empty ones."""
    runs: list[tuple[int, int]] = []
    pairs = [tuple(_integers(pair, f"{name}[{i}]")) for i, pair in enumerate(_entries(values, name))]
    for pair in sorted(pairs):
        if len(pair) != 2:
            raise ValueError(f"{name} has {shown(pair)}; an interval has a first and a last layer")
        first, last = bisect_left(at, pair[0]), bisect_right(at, pair[1]) - 1
        first = max(first, runs[-1][1] + 1) if runs else first
        if first <= last:
            runs.append((first, last))
    return runs


def _escapes(
    problem: Problem, starts: list[tuple[int, int]], allowed: list[tuple[int, int]], slot: ModeSlot, limit: int
) -> Iterator[int]:
    """Ends that are not allowed, where a block from one of the starts can end.

    If it can from any start, then from the nearest, since that block is the smallest. Only where blocks need something
    at their start, all are tried. No block ends beyond what its layers alone allow.
    """
    firsts = [first for first, _ in allowed]
    for i, ((first, last), (until, _)) in enumerate(pairwise([*starts, (problem.n, problem.n)])):
        stop = min(until, max(last, min(slot.time.last_end(last, limit), slot.need.last_end(last, slot.room))))
        end = first + 1
        while end <= stop:
            run = bisect_right(firsts, end) - 1
            if run >= 0 and allowed[run][1] >= end:
                end = allowed[run][1] + 1
                continue
            tried = starts[: i + 1] if slot.need.entry else [(min(end - 1, last),) * 2]
            if any(_fits(problem, slot, start, end, limit) for a, b in tried for start in range(a, min(b + 1, end))):
                yield end
            end += 1


def _fits(problem: Problem, slot: ModeSlot, start: int, end: int, limit: int) -> bool:
    fits = slot.need.of(start, end) <= slot.room and slot.time.of(start, end) <= limit
    return fits and not any(start < pin < end for pin in problem.pins)


def _check_thresholds(placement: Placement, model: Model, m: int, value: Fraction) -> None:
    """Between each two neighbouring times of the slowest block nothing finishes before `value`."""
    witness = enumerate(_entries(placement.witness, "witness"))
    thresholds = [ratio(threshold, f"witness[{i}]") * model.unit for i, threshold in witness]
    for low, high in pairwise([Fraction(0), *thresholds, Fraction(model.problem.endless)]):
        least = _least_latency(model.problem, ceil(high) - 1)  # times are integers
        if least is not None and least + (m - 1) * low < value:
            raise ValueError(f"the witness does not exclude a slowest block of {model.time(low)} or a little more")


def _least_latency(problem: Problem, limit: int) -> int | None:
    """The least sum of times within the limit, by the least over all starts of each block; None if there is none."""
    before: dict[int, int] = {0: 0}
    for modes in problem.slots:
        table: dict[int, int] = {}
        for slot in modes:
            time, need, room = slot.time, slot.need, slot.room
            known = {start: latency - time.prefix[start] for start, latency in before.items()}
            for end in range(1, problem.n + 1):
                cut = time.leave[end] if time.leave else 0
                by_time = bisect_left(time.prefix, time.prefix[end] + cut - limit)
                by_room = bisect_left(need.prefix, need.prefix[end] - room)
                starts = range(max(by_time, by_room, problem.last_pin[end]), end)
                found = [known[s] for s in starts if s in known and not (need.entry and need.of(s, end) > room)]
                if found:
                    latency = min(found) + time.prefix[end] + cut
                    table[end] = min(latency, table.get(end, latency))
        before = table
    return before.get(problem.n)


def _check_sizes(sizes: list[int], layers: int) -> None:
    """ValueError unless these are the sizes of non-empty blocks of so many layers."""
    for j, size in enumerate(sizes):
        if size < 1:
            raise ValueError(f"sizes[{j}] is {shown(size)}; every block needs at least one layer")
    if sum(sizes) != layers:
        raise ValueError(f"the sizes add up to {shown(sum(sizes))} layers, there are {layers} costs")


def _check_fields(result: Any, expected: dict[str, Any]) -> None:
    """ValueError unless each of these fields has the value that it should have.

    True does not equal 1 here, and NaN equals nothing.
    """
    for name, value in expected.items():
        said = getattr(result, name)
        if not _same(said, value):
            raise ValueError(f"{name} should be {shown(value, str)}, the result says {shown(said, str)}")


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return isinstance(found, (tuple, list)) and len(found) == len(expected) and all(map(_same, found, expected))
    if not isinstance(expected, Real):
        return type(found) is type(expected) and bool(found == expected)
    return isinstance(found, Real) and not isinstance(found, bool) and bool(found == expected)


def _integers(values: Any, name: str) -> list[int]:
    """The entries of a tuple of ints; TypeError names the first entry that is not an int."""
    entries = _entries(values, name)
    for j, value in enumerate(entries):
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError(f"{name}[{j}] must be an int, got {shown(value)} of type {type(value).__name__}")
    return list(map(int, entries))


def _entries(values: Any, name: str) -> tuple[Any, ...]:
    """The entries of a tuple, or of the list that JSON may have made of it."""
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"{name} must be a tuple, got {shown(values)} of type {type(values).__name__}")
    return tuple(values)
