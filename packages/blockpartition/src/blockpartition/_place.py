""":func:`place`: costs, stages and constraints in, a placement with its proof out."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

from ._arguments import InFlight, choice
from ._bottleneck import Chosen, least_slowest, slowest
from ._even import sizes_of
from ._explain import explain
from ._grid import Number, ceiling, number, ratio
from ._makespan import least_makespan, makespan
from ._model import Model, read_model
from ._partition import Placement
from ._problem import Bound
from ._reach import Reach
from ._stages import Stage
from ._sums import prefix_sums


def place(
    costs: Iterable[Any],
    stages: int | Iterable[Stage],
    *,
    memory: Iterable[Any] | None = None,
    activations: Iterable[Any] | None = None,
    boundary: Iterable[Any] | None = None,
    in_flight: InFlight | None = None,
    transfer: Iterable[Any] | None = None,
    overlap: bool = False,
    forbid: Iterable[int] = (),
    pin: Iterable[int] = (),
    order: Literal["fixed", "free"] = "fixed",
    microbatches: int | None = None,
    objective: Literal["bottleneck", "makespan"] = "bottleneck",
    gap: Number = 0,
) -> Placement:
    """Place one non-empty block on each stage, so that the slowest stage is as fast as possible.

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
            + transfer, or the longer of the two with `overlap=True`.
        forbid, pin: cuts that are not allowed, and cuts that are required. A cut is named by the layer right after it.
        order: "free" also chooses the order of the stages; fast if there are few kinds of stages.
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
    model = read_model(
        costs, stages, memory=memory, activations=activations, boundary=boundary, in_flight=in_flight,
        transfer=transfer, overlap=overlap, forbid=forbid, pin=pin, order=order, microbatches=microbatches,
    )  # fmt: skip
    slack = Fraction(*ratio(gap, "gap"))
    return _by_makespan(model, slack) if objective == "makespan" else _by_bottleneck(model)


def _by_bottleneck(model: Model) -> Placement:
    found = least_slowest(model.problem)
    if found is None:
        raise explain(model)
    value, blocks = found
    below = Reach(model.problem, Bound(value, strict=True)).ends
    at = model.positions
    return _describe(model, blocks, tuple(tuple((at[a], at[b]) for a, b in ends) for ends in below), 0.0)


def _by_makespan(model: Model, gap: Fraction) -> Placement:
    if model.microbatches is None:
        raise ValueError("objective='makespan' depends on how many micro-batches there are: pass microbatches=…")
    found = least_makespan(model.problem, model.microbatches, gap)
    if found is None:
        raise explain(model)
    thresholds = tuple(threshold / model.scale for threshold in found.thresholds)
    proven = found.value / found.floor - 1 if found.floor else Fraction(0)
    # Rounded up, so that it promises no more than is proven; but at most the gap that was asked for, which is proven
    # too.
    return _describe(model, found.blocks, thresholds, min(ceiling(proven, 1, float), gap))


def _describe(model: Model, blocks: list[Chosen], witness: tuple[Any, ...], gap: Number) -> Placement:
    problem, m = model.problem, model.microbatches
    ends = [0, *(model.positions[block.end] for block in blocks)]
    sums = prefix_sums(model.costs.units)
    return Placement(
        sizes=sizes_of(ends),
        loads=tuple(model.costs.value(sums[end] - sums[start]) for start, end in pairwise(ends)),
        bottleneck=model.time(slowest(problem, blocks)),
        lower_bound=model.time(max(model.mean_time, model.heaviest_time)),
        imbalance=_quotient(slowest(problem, blocks), model.mean_time),
        witness=witness,
        gap=gap,
        order=model.stages_of(blocks),
        times=tuple(model.time(problem.time(block.start, block.end, block.slot)) for block in blocks),
        makespan=None if m is None else model.time(makespan(problem, blocks, m)),
        modes=model.modes_of(blocks),
    )


def _quotient(slow: Fraction, mean: Fraction) -> Number:
    share = slow / mean if mean else Fraction(1)
    return number(share.numerator, share.denominator, float)
