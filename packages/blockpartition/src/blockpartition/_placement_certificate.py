"""The checker of placements. It reads the problem again, uses no solver, and tries every possible end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf, lcm
from typing import Any, TypeAlias

from ._fields import entries_of, integers, same
from ._grid import number, ratio, shown
from ._model import Model
from ._partition import Placement, check_sizes
from ._problem import Bound, Problem, Slot

Block: TypeAlias = tuple[int, int, Slot]
Run: TypeAlias = tuple[int, int]


def check_placement(placement: Placement, model: Model, objective: str, gap: Fraction) -> None:
    """Return if the placement is valid and, by its witness, optimal; ValueError with the reason if not.

    A bottleneck takes a look at each interval of the witness and at the ends it denies within reach, a makespan a look
    at all pairs of positions within reach, for each step between sets of stages and for each bound of the witness.
    """
    if objective == "makespan" and model.microbatches is None:
        raise ValueError("a makespan depends on how many micro-batches there are: pass microbatches=…")
    blocks = _blocks(placement, model)
    for block in blocks:
        _check_room(block, model)
    _check_numbers(placement, model, blocks)
    _check_gap(placement, objective, gap)
    slowest = max(model.problem.time(*block) for block in blocks)
    if objective == "bottleneck":
        _check_reach(placement, model, slowest)
    else:
        _check_thresholds(placement, model, _makespan(model, blocks))


def _blocks(placement: Placement, model: Model) -> list[Block]:
    """The blocks at the positions of the problem, on its slots."""
    k = len(model.stages)
    if sorted(integers(placement.order, "order")) != list(range(k)) or len(placement.sizes) != k:
        raise ValueError(f"{len(placement.sizes)} blocks on stages {placement.order}; each of {k} stages needs one")
    check_sizes(placement.sizes, len(model.costs.units))
    layers = [0, *accumulate(placement.sizes)]
    position = {layer: p for p, layer in enumerate(model.positions)}
    for cut in layers:
        if cut not in position:
            raise ValueError(f"cut {cut} is forbidden")
    modes = entries_of(placement.modes, "modes")
    if len(modes) != k:
        raise ValueError(f"{len(modes)} modes for {k} blocks")
    blocks, state = [], 0
    for (start, end), stage, mode in zip(pairwise(layers), placement.order, modes, strict=True):
        state, slot = _follow(model, state, stage, _index(model, stage, mode))
        blocks.append((position[start], position[end], slot))
    return blocks


def _index(model: Model, stage: int, mode: Any) -> int:
    """Which of the stage's modes this is."""
    names = [option.name for option in model.options[stage]]
    if not (mode is None or isinstance(mode, str)) or mode not in names:
        raise ValueError(f"stage {stage} has the modes {names}, not {shown(mode)}")
    return names.index(mode)


def _follow(model: Model, state: int, stage: int, mode: int) -> tuple[int, Slot]:
    """The set of stages after one more, and its slot."""
    for after, steps in enumerate(model.problem.into):
        for step in steps:
            if (step.before, step.slot.stage, step.slot.mode) == (state, model.kinds[stage], mode):
                return after, step.slot
    raise ValueError(f"stage {stage} is out of order")


def _check_room(block: Block, model: Model) -> None:
    start, end, slot = block
    if not _has_room(start, end, slot):
        raise ValueError(f"layers {model.positions[start]} to {model.positions[end] - 1} do not fit on their stage")
    for pin in model.problem.pins:
        if start < pin < end:
            raise ValueError(f"cut {model.positions[pin]} is pinned, and a block goes across")


def _has_room(start: int, end: int, slot: Slot) -> bool:
    entry = slot.need.entry[start] if slot.need.entry else 0
    return slot.need.prefix[end] - slot.need.prefix[start] + entry <= slot.room


def _check_numbers(placement: Placement, model: Model, blocks: list[Block]) -> None:
    sums = [0, *accumulate(model.costs.units)]
    times = [model.problem.time(*block) for block in blocks]
    ends = [0, *accumulate(placement.sizes)]
    mean = model.mean_time
    expected: dict[str, Any] = {
        "loads": tuple(model.costs.value(sums[end] - sums[start]) for start, end in pairwise(ends)),
        "times": tuple(map(model.time, times)),
        "bottleneck": model.time(max(times)),
        "lower_bound": model.time(max(mean, model.heaviest_time)),
        "imbalance": number(*(max(times) / mean).as_integer_ratio(), float) if mean else 1.0,
        "makespan": None if model.microbatches is None else model.time(_makespan(model, blocks)),
    }
    for name, value in expected.items():
        said = getattr(placement, name)
        if not same(said, value):
            raise ValueError(f"{name} should be {shown(value, str)}, the placement says {shown(said, str)}")


def _check_gap(placement: Placement, objective: str, gap: Fraction) -> None:
    """A gap is part of what the witness of a makespan proves; a bottleneck has none."""
    stated = Fraction(*ratio(placement.gap, "gap"))
    if objective == "bottleneck" and stated:
        raise ValueError(f"gap should be 0, the placement says {shown(placement.gap, str)}")
    if stated > gap:
        raise ValueError(f"gap is {shown(placement.gap, str)}, more than {shown(gap, str)}")


def _makespan(model: Model, blocks: list[Block]) -> Fraction:
    assert model.microbatches is not None, model
    slowest = max(model.problem.time(*block) for block in blocks)
    return _latency(model.problem, blocks) + (model.microbatches - 1) * slowest


def _latency(problem: Problem, blocks: list[Block]) -> Fraction:
    total = Fraction(0)
    for start, end, slot in blocks:
        total += Fraction(slot.work.prefix[end] - slot.work.prefix[start], slot.speed)
        total += problem.transfer[end] if problem.transfer else 0
    return total


def _check_reach(placement: Placement, model: Model, slowest: Fraction) -> None:
    """Faster blocks stay within the witness, by induction over the sets of stages, and the witness misses the end."""
    problem, below = model.problem, Bound(slowest, strict=True)
    witness = entries_of(placement.witness, "witness")
    if len(witness) != len(problem.into):
        raise ValueError(f"the witness is about {len(witness)} sets of stages, there are {len(problem.into)}")
    allowed = [_at_positions(_intervals(entry, f"witness[{i}]"), model.positions) for i, entry in enumerate(witness)]
    if not allowed[0] or allowed[0][0][0] > 0:
        raise ValueError("the witness does not start at layer 0")
    if allowed[-1] and allowed[-1][-1][1] == problem.n:
        raise ValueError("the witness reaches the end: it proves nothing")
    for state, steps in enumerate(problem.into):
        for step in steps:
            limit = below.limit(step.slot.speed)
            denied = _outside(allowed[state], problem.last_position(state))
            way = _denied_from_any if step.slot.need.entry else _denied_from_nearest
            for end in way(problem, allowed[step.before], denied, step.slot, limit):
                raise ValueError(f"the witness denies that a faster block can end at {model.positions[end]}")


def _intervals(values: Any, name: str) -> list[tuple[int, int]]:
    pairs = [integers(pair, f"{name}[{i}]") for i, pair in enumerate(entries_of(values, name))]
    for i, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ValueError(f"{name}[{i}] is {tuple(pair)}; an interval has a first and a last layer")
    return [(first, last) for first, last in pairs]


def _at_positions(intervals: list[Run], positions: list[int]) -> list[Run]:
    """The same in positions of the problem, in order, without overlaps and empty ones."""
    runs: list[Run] = []
    for first, last in sorted(intervals):
        low, high = bisect_left(positions, first), bisect_right(positions, last) - 1
        low = max(low, runs[-1][1] + 1) if runs else low
        if low <= high:
            runs.append((low, high))
    return runs


def _outside(runs: list[Run], until: int) -> list[Run]:
    """The positions up to `until` that are in no run."""
    bounds = [(-1, -1), *runs, (until + 1, until + 1)]
    return [(last + 1, min(first - 1, until)) for (_, last), (first, _) in pairwise(bounds) if last + 1 <= until]


def _denied_from_nearest(
    problem: Problem, starts: list[Run], denied: list[Run], slot: Slot, limit: int
) -> Iterator[int]:
    """Denied ends where one block can end. If it can from any start, then from the nearest: that block is the smallest.

    From the last start before a gap only ends within reach of the work alone, and of the room, come into question.
    """
    lows = [low for low, _ in denied]
    for (first, last), (until, _) in pairwise([*starts, (problem.n, problem.n)]):
        by_work = bisect_right(slot.work.prefix, slot.work.prefix[last] + limit) - 1
        by_room = bisect_right(slot.need.prefix, slot.need.prefix[last] + slot.room) - 1
        stop = min(until, max(last, min(by_work, by_room)))
        for low, high in denied[max(0, bisect_right(lows, first) - 1) : bisect_right(lows, stop)]:
            for end in range(max(low, first + 1), min(high, stop) + 1):
                if _fits(problem, min(end - 1, last), end, slot, limit):
                    yield end


def _denied_from_any(problem: Problem, starts: list[Run], denied: list[Run], slot: Slot, limit: int) -> Iterator[int]:
    """The same where blocks need something at their start, and the nearest need not be the best: all are tried."""
    every = [start for first, last in starts for start in range(first, last + 1)]
    for low, high in denied:
        for end in range(max(low, 1), high + 1):
            nearest = bisect_left(every, end)
            furthest = bisect_left(every, bisect_left(slot.work.prefix, slot.work.prefix[end] - limit))
            if any(_fits(problem, start, end, slot, limit) for start in every[furthest:nearest]):
                yield end


def _fits(problem: Problem, start: int, end: int, slot: Slot, limit: int) -> bool:
    return (
        end <= problem.next_pin[start] and _has_room(start, end, slot) and problem.occupied(start, end, slot) <= limit
    )


def _check_thresholds(placement: Placement, model: Model, value: Fraction) -> None:
    """Between each two neighbouring bounds on the slowest block nothing finishes earlier, but for the gap."""
    assert model.microbatches is not None, model
    thresholds = [
        Fraction(*ratio(threshold, f"witness[{i}]"))
        for i, threshold in enumerate(entries_of(placement.witness, "witness"))
    ]
    bounds = [Fraction(0), *(threshold * model.scale for threshold in thresholds), None]
    for floor, ceiling in pairwise(bounds):
        assert floor is not None, bounds
        least = _least_latency(
            model.problem, model.problem.unbounded if ceiling is None else Bound(ceiling, strict=True)
        )
        if least is not None and (least + (model.microbatches - 1) * floor) * (1 + Fraction(placement.gap)) < value:
            raise ValueError(f"the witness does not exclude a slowest block of {model.time(floor)} or a little more")


def _least_latency(problem: Problem, bound: Bound) -> Fraction | None:
    """The least sum of times under the bound, in integers, by the least over all starts of each block."""
    unit = lcm(*{slot.speed for slot in problem.slots})
    tables: list[list[int | float]] = [[0] + [inf] * problem.n]
    for steps in problem.into[1:]:
        table: list[int | float] = [inf] * (problem.n + 1)
        for step in steps:
            ends = _extend(problem, tables[step.before], step.slot, bound.limit(step.slot.speed), unit)
            table = list(map(min, table, ends))
        tables.append(table)
    least = tables[-1][problem.n]
    return None if least == inf else Fraction(int(least), unit)


def _extend(problem: Problem, before: list[int | float], slot: Slot, limit: int, unit: int) -> Iterator[int | float]:
    """For each end the least latency with one more block; infinite where there is none."""
    weight, prefix = unit // slot.speed, slot.work.prefix
    reduced = [known - weight * total if known < inf else inf for known, total in zip(before, prefix, strict=True)]
    for end in range(problem.n + 1):
        first = _furthest_start(problem, end, slot, limit)
        if slot.need.entry:
            window = [reduced[start] for start in range(first, end) if _has_room(start, end, slot)]
        else:
            window = reduced[first:end]
        least = min(window, default=inf)
        cut = unit * problem.transfer[end] if problem.transfer else 0
        yield least + weight * prefix[end] + cut if least < inf else inf


def _furthest_start(problem: Problem, end: int, slot: Slot, limit: int) -> int:
    """The furthest start of a block that keeps the limit, the pins and the room, but for what it needs at its start."""
    cut = problem.transfer_work(end, slot)
    left = limit - (0 if problem.overlap else cut)
    if left < 0 or cut > limit:
        return end
    work, need = slot.work.prefix, slot.need.prefix
    return max(bisect_left(work, work[end] - left), bisect_left(need, need[end] - slot.room), problem.last_pin[end])
