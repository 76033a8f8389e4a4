"""Why nothing satisfies the constraints: a layer that fits nowhere, and how much more memory would be enough."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from ._bottleneck import least_slowest
from ._grid import Number, ceiling, number, shown
from ._infeasible import Infeasible
from ._measure import Measure
from ._model import Model
from ._problem import Problem, Slot


def explain(model: Model) -> Infeasible:
    """The error to raise if only the capacities can be the reason."""
    scale = _least_scale(model.problem)
    layer = _homeless(model.problem)
    capacity = _one_for_all(model, scale)
    reason = "no placement fits the capacities" if layer is None else _describe_layer(model, layer)
    return Infeasible(
        f"{reason}; {_advice(scale, capacity)}",
        layer=None if layer is None else model.positions[layer],
        scale=scale,
        capacity=capacity,
    )


def _least_scale(problem: Problem) -> Fraction | None:
    """The least factor on all capacities: the same search, with memory as work and capacity as speed."""
    into = [[replace(step, slot=_as_work(step.slot)) for step in steps] for steps in problem.into]
    found = least_slowest(replace(problem, into=into, transfer=None))
    return None if found is None else found[0]


def _as_work(slot: Slot) -> Slot:
    nothing = Measure([0] * len(slot.need.prefix))
    return replace(slot, work=slot.need, speed=slot.room, need=nothing, room=0)


def _homeless(problem: Problem) -> int | None:
    """The first layer that fits on no stage, at any place in the pipeline."""
    misfits = [set(slot.misfits) for slot in problem.slots]
    return min(set.intersection(*misfits), default=None)


def _describe_layer(model: Model, layer: int) -> str:
    need = min(slot.need.lightest[layer] for slot in model.problem.slots)
    first, last = model.positions[layer], model.positions[layer + 1] - 1
    who = f"layer {first} needs" if first == last else f"layers {first} to {last}, which no cut may part, need"
    return f"{who} {shown(model.memory(need), str)} at least and fit{'s' * (first == last)} on no stage"


def _one_for_all(model: Model, scale: Fraction | None) -> Number | None:
    """The least capacity, if all stages have the same one."""
    rooms = set(model.needs.rooms)
    if scale is None or len(rooms) > 1:
        return None
    room = rooms.pop()
    assert room is not None, model.needs  # without capacities everything fits
    return ceiling(scale * room, model.needs.scale, model.needs.kind)


def _advice(scale: Fraction | None, capacity: Number | None) -> str:
    if capacity is not None:
        return f"a capacity of {shown(capacity, str)} on each stage is the least that would do"
    if scale is None:
        return "no factor on the capacities would do: a stage with capacity 0 is in the way"
    return (
        f"capacities {shown(number(*scale.as_integer_ratio(), float), str)} times as large are the least that would do"
    )
