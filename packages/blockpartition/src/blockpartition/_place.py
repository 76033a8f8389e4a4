""":func:`place`: costs, stages and constraints in, a placement with its proof out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import Any, Literal

from ._arguments import InFlight, choice
from ._makespan import least_makespan
from ._model import Model, read_model
from ._numbers import Number, ceiling, number, ratio, shown
from ._problem import Measure, PlacedBlock, Problem, makespan, slowest
from ._reach import ReachableEnds, least_slowest
from ._results import Infeasible, Placement
from ._stages import Stage


def place(
    costs: Iterable[Any],
    stages: int | Iterable[Stage],
    *,
    memory: Iterable[Any] | None = None,
    activations: Iterable[Any] | None = None,
    boundary: Iterable[Any] | None = None,
    in_flight: InFlight | None = None,
    transfer: Iterable[Any] | None = None,
    forbid: Iterable[int] = (),
    pin: Iterable[int] = (),
    microbatches: int | None = None,
    objective: Literal["bottleneck", "makespan"] = "bottleneck",
    gap: Number = 0,
) -> Placement:
    """Place one non-empty block on each stage, in order, so that the slowest stage is as fast as possible.

    With `objective="makespan"` the last micro-batch is done as early as possible. The result is exact, as for `solve`.

    Args:
        costs: the cost of each layer, in any unit of work: ints, floats or Fractions, finite and not negative.
        stages: a number, or `Stage`s with a speed, a capacity and modes.
        memory, activations: the memory that each layer needs once, and for each micro-batch that its stage holds. The
            sum of a stage must not exceed its capacity. If neither these nor `boundary` are given, capacities limit the
            costs.
        boundary: the size of each layer's input for a micro-batch. A stage also keeps the input of its first layer, for
            each micro-batch that it holds.
        in_flight: the number of micro-batches that each stage holds: a list, "1f1b" (k - j on stage j, but at most
            `microbatches`) or "fill_drain" (all); 1 by default.
        transfer: the time of a cut after each layer. It is added to the stage before the cut, whose time is load/speed
            + transfer.
        forbid, pin: cuts that are not allowed, and cuts that are required. A cut is named by the layer right after it.
        objective: "bottleneck" minimises the time of the slowest stage; "makespan" minimises Σ (load/speed + transfer)
            + (microbatches - 1)·slowest, the time until the last micro-batch is done.
        gap: for the makespan, the relative distance from the optimum that is good enough; `Placement.gap` is the
            distance that was proven.
        microbatches: the number of micro-batches; needed for the makespan and for "fill_drain".

    Returns:
        The blocks with their loads (in the unit of the costs), times (costs / speed) and modes, and a proof that
        `verify` checks.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number is negative or not finite, or a list has another length than the layers or the stages.
        Infeasible: nothing satisfies the constraints; its fields say what would be enough.

    >>> place([4, 4, 4, 4, 4, 4], [Stage(speed=1), Stage(speed=2)]).sizes
    (2, 4)
    >>> place([4, 4, 4, 4, 4, 4], 2, pin=[1]).times
    (4, 20)

    With modes, the cuts and the mode of each stage are chosen together: here only the first stage, which holds two
    micro-batches, has to save memory.

    >>> from blockpartition import Mode
    >>> modes = [Mode("keep"), Mode("recompute", time=1.5, saved=0, transient=1)]
    >>> stages = [Stage(capacity=8, modes=modes)] * 2
    >>> found = place([4] * 4, stages, activations=[3] * 4, boundary=[1] * 4, in_flight="1f1b")
    >>> found.sizes, found.modes
    ((2, 2), ('recompute', 'keep'))
    """
    choice(objective, "objective", ["bottleneck", "makespan"])
    slack = ratio(gap, "gap")
    model = read_model(
        costs, stages, memory=memory, activations=activations, boundary=boundary, in_flight=in_flight,
        transfer=transfer, forbid=forbid, pin=pin, microbatches=microbatches,
    )  # fmt: skip
    if objective == "makespan":
        return _by_makespan(model, slack)
    blocks, at = least_slowest(model.problem), model.positions
    if blocks is None:
        raise _explained(model)
    below = ReachableEnds(model.problem, slowest(blocks) - 1).ends
    return _described(model, blocks, tuple(tuple((at[a], at[b]) for a, b in ends) for ends in below), 0.0)


def _by_makespan(model: Model, gap: Fraction) -> Placement:
    if model.microbatches is None:
        raise ValueError("objective='makespan' depends on how many micro-batches there are: pass microbatches=…")
    found = least_makespan(model.problem, model.microbatches, gap)
    if found is None:
        raise _explained(model)
    thresholds = tuple(Fraction(threshold, model.unit) for threshold in found.thresholds)
    proven = Fraction(makespan(found.blocks, model.microbatches), found.floor) - 1 if found.floor else Fraction(0)
    # Rounded up, so that it promises no more than is proven, but no more than was asked for, which is proven too.
    return _described(model, found.blocks, thresholds, min(ceiling(proven, float), gap))


def _described(model: Model, blocks: list[PlacedBlock], witness: tuple[Any, ...], gap: Number) -> Placement:
    sums, m = list(accumulate(model.costs.units, initial=0)), model.microbatches
    ends = [0, *(model.positions[block.end] for block in blocks)]
    return Placement(
        sizes=tuple(end - start for start, end in pairwise(ends)),
        loads=tuple(model.costs.value(sums[end] - sums[start]) for start, end in pairwise(ends)),
        bottleneck=model.time(slowest(blocks)),
        lower_bound=model.time(model.lower_bound),
        imbalance=model.imbalance(slowest(blocks)),
        witness=witness,
        gap=gap,
        times=tuple(model.time(block.time) for block in blocks),
        makespan=None if m is None else model.time(makespan(blocks, m)),
        modes=tuple(block.slot.mode for block in blocks),
    )


def _explained(model: Model) -> Infeasible:
    """The error if only the capacities can be the reason: a layer that fits nowhere, and what would be enough."""
    scale, problem, at = _least_scale(model.problem), model.problem, model.positions
    slots = [slot for modes in problem.slots for slot in modes]
    misfit = min(set.intersection(*(set(slot.need.heavier(slot.room)) for slot in slots)), default=None)
    reason, layer, capacity = "no placement fits the capacities", None, None
    if misfit is not None:
        layer, last = at[misfit], at[misfit + 1] - 1
        need = number(min(slot.need.lightest[misfit] for slot in slots), model.memory_unit, model.memory_kind)
        who = f"layer {layer} needs" if layer == last else f"layers {layer} to {last}, which no cut may part, need"
        reason = f"{who} {shown(need, str)} at least and fit{'s' * (layer == last)} on no stage"
    if scale is None:
        advice = "no factor on the capacities would do: a stage with capacity 0 is in the way"
    elif len(set(model.capacities)) == 1:
        capacity = ceiling(scale * (model.capacities[0] or 0), model.memory_kind)
        advice = f"a capacity of {shown(capacity, str)} on each stage is the least that would do"
    else:
        factor = number(*scale.as_integer_ratio(), float)
        advice = f"capacities {shown(factor, str)} times as large are the least that would do"
    return Infeasible(f"{reason}; {advice}", layer=layer, scale=scale, capacity=capacity)


def _least_scale(problem: Problem) -> Fraction | None:
    """The least factor on all capacities: the same search, with memory as time and room as speed."""
    slots = [slot for modes in problem.slots for slot in modes]
    unit, nothing = lcm(*(slot.room for slot in slots if slot.room)), Measure([0] * (problem.n + 1))
    endless = 1 + unit * max(slot.need.prefix[-1] + max(slot.need.entry or [0]) for slot in slots)

    def times(values: list[int], room: int) -> list[int]:
        return [x * (unit // room if room else endless) for x in values]

    def as_time(need: Measure, room: int) -> Measure:
        return Measure(times(need.prefix, room), need.entry and times(need.entry, room))

    swapped = [
        [replace(slot, time=as_time(slot.need, slot.room), need=nothing, room=0) for slot in modes]
        for modes in problem.slots
    ]
    found = least_slowest(replace(problem, slots=swapped, least=nothing.prefix))
    return None if found is None or slowest(found) >= endless else Fraction(slowest(found), unit)
