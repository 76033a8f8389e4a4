""":func:`place`: find a provably optimal placement of blocks on stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import Any, Literal

from ._arguments import InFlight
from ._makespan import least_makespan
from ._numbers import Number, Scale, ceiling, ratio
from ._problem import Measure, ModeSlot, PlacedBlock, Problem, makespan, slowest
from ._reach import least_slowest
from ._read import read_problem
from ._results import Infeasible, Placement
from ._stages import Stage


def place(
    costs: Iterable[Any],
    stages: int | Iterable[Stage],
    *,
    memory: Iterable[Any] | None = None,
    activations: Iterable[Any] | None = None,
    in_flight: InFlight | None = None,
    transfer: Iterable[Any] | None = None,
    forbid: Iterable[int] = (),
    pin: Iterable[int] = (),
    microbatches: int | None = None,
    objective: Literal["bottleneck", "makespan"] = "bottleneck",
    gap: Number = 0,
) -> Placement:
    """Place one non-empty block on each stage, in order, minimizing the time of the slowest stage exactly.

    Args:
        costs: the cost of each layer, in any unit of work: ints, floats or Fractions, finite and not negative.
        stages: a number, or `Stage`s with a speed, a capacity and modes.
        memory, activations: the memory that each layer needs once, and per micro-batch in flight on its stage. If
            neither is given, capacities limit the costs.
        in_flight: the number of micro-batches in flight on each stage: a list, "1f1b" (k - j on stage j, but at most
            `microbatches`) or "fill_drain" (all); 1 by default.
        transfer: the time of a cut after each layer, added to load/speed of the stage before the cut.
        forbid, pin: cuts that are not allowed, and cuts that are required. A cut is the index of the first layer after
            it.
        objective: "bottleneck" minimizes the time of the slowest stage; "makespan" minimizes Σ (load/speed + transfer)
            + (microbatches - 1)·slowest, the time until the last micro-batch leaves the pipeline.
        gap: for the makespan, the acceptable relative distance from the optimum; `Placement.gap` is the distance that
            was proven.
        microbatches: the number of micro-batches, required for the makespan and for "fill_drain".

    Returns:
        The blocks with their loads (in the unit of the costs), times and modes.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is negative or not finite, or a list has the wrong length.
        Infeasible: no placement satisfies the constraints; its fields describe capacities that would be enough.

    >>> place([4, 4, 4, 4, 4, 4], [Stage(speed=1), Stage(speed=2)]).sizes
    (2, 4)
    >>> place([4, 4, 4, 4, 4, 4], 2, pin=[1]).times
    (4, 20)

    Modes trade time for memory. Here only the first stage, with two micro-batches in flight, has to recompute:

    >>> from blockpartition import Mode
    >>> modes = [Mode("keep"), Mode("recompute", time=1.5, saved=0.1, transient=1)]
    >>> stages = [Stage(capacity=8, modes=modes)] * 2
    >>> found = place([4] * 4, stages, activations=[3] * 4, in_flight="1f1b")
    >>> found.sizes, found.modes
    ((2, 2), ('recompute', 'keep'))
    """
    slack = ratio(gap, "gap")
    problem = read_problem(
        costs, stages, memory=memory, activations=activations, in_flight=in_flight, transfer=transfer, forbid=forbid,
        pin=pin, microbatches=microbatches, objective=objective,
    )  # fmt: skip
    fastest = least_slowest(problem)
    if fastest is None:
        raise _explain_infeasible(problem)
    if objective == "bottleneck":
        return build_placement(problem, fastest, 0.0)
    blocks, floor = least_makespan(problem, fastest, slack)
    proven = Fraction(makespan(blocks, problem.microbatches or 1), floor) - 1 if floor else Fraction(0)
    # Round the gap up, so that it claims no more than is proven. The requested gap is proven, so it is the maximum.
    return build_placement(problem, blocks, min(ceiling(proven, rounded=True), gap))


def build_placement(problem: Problem, blocks: list[PlacedBlock], gap: Number) -> Placement:
    sums, m = list(accumulate(problem.costs.units, initial=0)), problem.microbatches
    ends = [0, *(problem.positions[block.end] for block in blocks)]
    work, speed = problem.work[-1], problem.speeds[-1]
    return Placement(
        sizes=tuple(end - start for start, end in pairwise(ends)),
        loads=tuple(problem.costs.value(sums[end] - sums[start]) for start, end in pairwise(ends)),
        bottleneck=problem.time.value(slowest(blocks)),
        lower_bound=problem.time.value(problem.lower_bound),
        imbalance=Scale(1, rounded=True).value(Fraction(slowest(blocks) * speed, work)) if work else 1.0,
        witness=(),
        gap=gap,
        times=tuple(problem.time.value(block.time) for block in blocks),
        makespan=None if m is None else problem.time.value(makespan(blocks, m)),
        modes=tuple(block.slot.mode for block in blocks),
    )


def _explain_infeasible(problem: Problem) -> Infeasible:
    """Explain infeasible capacities: name a layer that fits on no stage, and the smallest sufficient capacities."""
    slots = [slot for modes in problem.slots for slot in modes]
    scale, at = _least_scale(problem, slots), problem.positions
    misfit = min(set.intersection(*(set(slot.need.heavier(slot.room)) for slot in slots)), default=None)
    reason, layer, capacity = "no placement fits the capacities", None, None
    if misfit is not None:
        layer, last = at[misfit], at[misfit + 1] - 1
        need = problem.memory.value(min(slot.need.alone[misfit] for slot in slots))
        who = f"layer {layer} needs" if layer == last else f"layers {layer} to {last}, which no cut may split, need"
        reason = f"{who} at least {need} and fit{'s' * (layer == last)} on no stage"
    if scale is None:
        advice = "no factor on the capacities is sufficient, because a stage has capacity 0"
    elif len({slot.room for slot in slots}) == 1:
        capacity = ceiling(scale * slots[0].room / problem.memory.scale, problem.memory.rounded)
        advice = f"the smallest sufficient capacity of each stage is {capacity}"
    else:
        advice = f"the smallest sufficient capacities are {Scale(1, rounded=True).value(scale)} times as large"
    return Infeasible(f"{reason}; {advice}", layer=layer, scale=scale, capacity=capacity)


def _least_scale(problem: Problem, slots: list[ModeSlot]) -> Fraction | None:
    """Return the smallest sufficient factor on all capacities, by a search with memory as time, capacity as speed."""
    # A block fits if need ≤ factor · room, that is, if need · unit / room ≤ factor · unit.
    unit = lcm(*(slot.room for slot in slots if slot.room))
    infinite = 1 + unit * max(slot.need.prefix[-1] for slot in slots)

    # Without room, only blocks that need no memory fit, whatever the factor.
    def swap(slot: ModeSlot) -> ModeSlot:
        weight = unit // slot.room if slot.room else infinite
        needs = [weight * x for x in slot.need.prefix]
        return replace(slot, time=Measure(needs, needs), room=slot.need.prefix[-1])

    roomy = [list(map(swap, modes)) for modes in problem.slots]
    found = least_slowest(replace(problem, slots=roomy, work=[0] * (problem.n + 1)))
    return None if found is None or slowest(found) >= infinite else Fraction(slowest(found), unit)
