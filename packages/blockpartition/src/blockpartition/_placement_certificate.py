"""The checker of placements. It reads the problem anew, asks no solver, and tries every end there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from ._fields import entries_of, integers, same
from ._grid import number, ratio, shown
from ._model import Model
from ._partition import Placement, check_sizes
from ._problem import Bound, Problem, Slot

Block: TypeAlias = tuple[int, int, Slot]


def check_placement(placement: Placement, model: Model, objective: str, gap: Fraction) -> None:
    """Return if the placement is valid and, by its witness, optimal; ValueError with the reason if not.

    A bottleneck takes a pass over the positions for each step between sets of stages, a makespan one over all pairs of
    positions for each of these and each bound of the witness.
    """
    if objective == "makespan" and model.microbatches is None:
        raise ValueError("a makespan depends on how many micro-batches there are: say microbatches=…")
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
    allowed = [_positions_in(_intervals(entry, f"witness[{i}]"), model.positions) for i, entry in enumerate(witness)]
    if 0 not in allowed[0]:
        raise ValueError("the witness does not start at layer 0")
    if problem.n in allowed[-1]:
        raise ValueError("the witness reaches the end: it proves nothing")
    for state, steps in enumerate(problem.into):
        for step in steps:
            ends = set(_ends(problem, allowed[step.before], step.slot, below.limit(step.slot.speed)))
            denied = {end for end in ends - allowed[state] if end <= problem.last_position(state)}
            if denied:
                raise ValueError(f"the witness denies that a faster block can end at {model.positions[min(denied)]}")


def _intervals(values: Any, name: str) -> list[tuple[int, int]]:
    pairs = [integers(pair, f"{name}[{i}]") for i, pair in enumerate(entries_of(values, name))]
    for i, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ValueError(f"{name}[{i}] is {tuple(pair)}; an interval has a first and a last layer")
    return [(first, last) for first, last in pairs]


def _positions_in(intervals: Iterable[tuple[int, int]], positions: list[int]) -> set[int]:
    pairs = list(intervals)
    return {p for p, layer in enumerate(positions) if any(first <= layer <= last for first, last in pairs)}


def _ends(problem: Problem, starts: set[int], slot: Slot, limit: int) -> Iterator[int]:
    """Where one block can end. If it can from any start, then from the nearest: that block is the smallest.

    Not so where blocks need something at their start: there every start is tried.
    """
    if slot.need.entry:
        yield from (
            end
            for end in range(1, problem.n + 1)
            if any(_fits(problem, start, end, slot, limit) for start in starts if start < end)
        )
        return
    start = None
    for end in range(1, problem.n + 1):
        start = end - 1 if end - 1 in starts else start
        if start is not None and _fits(problem, start, end, slot, limit):
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
    tables = [{0: Fraction(0)}]
    for steps in problem.into[1:]:
        table: dict[int, Fraction] = {}
        for step in steps:
            for end, cost in _extend(problem, tables[step.before], step.slot, bound.limit(step.slot.speed)):
                table[end] = min(cost, table.get(end, cost))
        tables.append(table)
    return tables[-1].get(problem.n)


def _extend(problem: Problem, table: dict[int, Fraction], slot: Slot, limit: int) -> Iterator[tuple[int, Fraction]]:
    for start, cost in table.items():
        for end in range(start + 1, problem.n + 1):
            if _fits(problem, start, end, slot, limit):
                yield end, cost + _latency(problem, [(start, end, slot)])
