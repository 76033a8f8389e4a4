"""The makespan alone is that of the replay with all its events, exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import SCHEDULES, Schedule, named
from gpipe.schedule._named import lanes
from gpipe.simulate import Link, StageCost, makespan, simulate

from ..schedules import V_SHAPED, names
from ..timelines import exact_seconds, fewer, problems, stage_costs

MODES = st.sampled_from(["never", "except_last", "always"])
Problem = tuple[Schedule, list[StageCost], list[int]]


@fewer
@given(problems(), st.data())
def test_the_makespan_of_a_simulation(problem: Problem, data: st.DataObject):
    schedule, costs, placement = problem
    modes = data.draw(st.none() | MODES | st.lists(MODES, min_size=len(costs), max_size=len(costs)))
    times = exact_seconds | st.builds(Link, exact_seconds, st.sampled_from([16.0, float("inf")]))
    transfer = data.draw(times | st.lists(times, min_size=len(costs) - 1, max_size=len(costs) - 1))
    given = {"checkpoint": modes, "placement": placement, "transfer": transfer}
    assert makespan(schedule, costs, **given) == simulate(schedule, costs, **given).makespan


@given(st.integers(0, 6), st.integers(1, 4), st.sampled_from(sorted(SCHEDULES)), st.data())
def test_schedules_by_their_names(m: int, n: int, name: str, data: st.DataObject):
    n *= 2 if name in V_SHAPED else 1
    costs = data.draw(st.lists(stage_costs(), min_size=n, max_size=n))
    modes = data.draw(MODES | st.lists(MODES, min_size=n, max_size=n))
    timeline = simulate(name, costs, microbatches=m, checkpoint=modes)
    assert makespan(name, costs, microbatches=m, checkpoint=modes) == timeline.makespan


@given(names(), st.integers(1, 9), st.booleans(), st.data())
def test_steps_made_while_they_are_read_are_those_of_the_schedule(
    case: tuple[str, list[int]], m: int, alone: bool, data: st.DataObject
):
    name, placement = case
    placement = [0] * len(placement) if alone else placement
    stops = data.draw(st.lists(st.integers(0, m), min_size=len(placement), max_size=len(placement)))
    split = data.draw(st.none() | st.sets(st.sampled_from(range(len(placement)))))
    found = tuple(tuple((j, tuple(action)) for j, action in lane) for lane in lanes(name, m, placement, stops, split))
    assert found == named(name, m, placement, stops, split).on(placement)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoint": "sometimes"}, "checkpoint: expected one of 'always', 'except_last', 'never', got 'sometimes'"),
        ({"checkpoint": ["never"]}, "checkpoint: expected a mode for each of 2 stages, got 1"),
        ({"placement": [0]}, "placement: expected one for each of the schedule's 2 stages, got 1"),
        ({"transfer": [1, 2]}, "transfer: expected one entry for each of 1 links, got 2"),
    ],
)
def test_wrong_arguments(given: dict[str, object], message: str):
    for run in (simulate, makespan):
        with pytest.raises(ValueError, match=message):
            run("1f1b", [StageCost(1, 1)] * 2, microbatches=2, **given)
