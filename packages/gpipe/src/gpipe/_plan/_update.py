"""Search the balance of a plan again, by the times of cells in a recorded step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TypeVar

from profiler.text import format_seconds

from ..engine._stage import first_to_last
from ..schedule import Kind
from ..schedule._flags import extended
from ..timeline import Timeline
from ..timeline._events import SECONDS
from ._calibrate import learned
from ._candidate import Candidate, Space, by_seconds, with_costs
from ._costs import bounds
from ._data import Expected, PlanData
from ._outcome import plan_of
from ._search import search

Plan = TypeVar("Plan", bound=PlanData)


def update(plan: Plan, timeline: Timeline) -> Plan:
    """The plan with a balance found by the times of cells in a recorded step; see :meth:`gpipe.Plan.update`.

    Args:
        plan: what the step was planned by.
        timeline: of that step.

    Returns:
        A plan of the same class, with the same chunks, schedule and modes.

    Raises:
        TypeError: ``timeline`` is none.
        ValueError: it is not one of one step with this plan; or the plan was read from JSON.
    """
    space, now = plan._here.space, plan._here.chosen
    if space is None or now is None:
        raise ValueError(
            "plan: what was measured of the layers is not in the file it was read from; make the plan again by "
            "gpipe.plan(...), and update that"
        )
    _expect_step_of(plan, timeline)
    space = _with_balance_open(replace(space, measured=learned(space.measured, now, [timeline])), now)
    stay = with_costs(now, space.measured)
    took = timeline.makespan + stay.costs.reduction(stay.sizes) + space.measured.step
    before = plan.predicted.seconds
    factor = took / stay.seconds / before.mid
    note = f"updated: a recorded step took {format_seconds(took)} where {format_seconds(before.mid)} were expected"
    return plan_of(
        type(plan),
        by_seconds([stay, *_others(search(space), stay)]),
        space,
        plan.layers,
        plan.devices,
        Expected(*(factor * seconds for seconds in (before.low, before.mid, before.high))),
        [*plan.notes, note],
        plan._here,
    )


def _with_balance_open(space: Space, now: Candidate) -> Space:
    """All but the balance stays, so that a pipe can be given it while it trains."""
    modes = [(mode,) for mode in extended(now.modes, now.sizes)]
    return replace(space, chunks=[now.chunks], schedules=[now.schedule], modes=modes, pieces=False)


def _others(found: list[Candidate], stay: Candidate) -> list[Candidate]:
    return [each for each in found if (each.sizes, each.split) != (stay.sizes, stay.split)]


def _expect_step_of(plan: PlanData, timeline: Timeline) -> None:
    if not isinstance(timeline, Timeline):
        raise TypeError(f"timeline: expected a gpipe.Timeline, as record() yields it, got {type(timeline).__name__}")
    kinds = {Kind.FORWARD: Kind.FORWARD, Kind.BACKWARD: Kind.BACKWARD, Kind.BACKWARD_INPUT: Kind.BACKWARD}
    found = Counter((e.stage, e.microbatch, kinds[e.kind]) for e in timeline.events if e.kind in kinds)
    cells = [(j, i, kind) for j in range(len(plan.sizes)) for i in range(plan.chunks) for kind in set(kinds.values())]
    if timeline.unit != SECONDS or found != Counter(cells):
        raise ValueError(
            f"timeline: expected one step in seconds, of {plan.chunks} micro-batches on {len(plan.sizes)} stages, "
            f"recorded by `with gpipe.record() as timeline: pipe.step(...)`; got {len(timeline.events)} actions on "
            f"{timeline.microbatches} micro-batches and {timeline.stages} stages, in {timeline.unit}"
        )
    for event in timeline.events:
        names = _names(plan, event.stage)
        if event.layers not in (first_to_last(names), ", ".join(names)):  # as recorded, or as predicted
            raise ValueError(
                f"timeline: expected layers {first_to_last(names)} on stage {event.stage}, as planned, got "
                f"{event.layers}; record a step after pipe.rebalance(plan.balance)"
            )


def _names(plan: PlanData, stage: int) -> list[str]:
    first, end = bounds(plan.sizes)[stage]
    return [layer.name for layer in plan.layers[first:end]]
