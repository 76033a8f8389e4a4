"""A replay: workers do their steps in order, each as soon as its input is there; and its end alone, exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import SCHEDULES, Kind, Program, Schedule, Span, Step, replay
from gpipe.simulate import Link, StageCost, makespan, simulate

from ..schedules import V_SHAPED, Scheduled, executed, needs, orders, shuffled
from ..timelines import Problem, exact_seconds, fewer, problems

SECONDS = st.integers(0, 5)
MODES = st.sampled_from(["never", "except_last", "always"])


@given(orders(), st.data())
def test_each_step_begins_as_soon_as_it_can(case: Scheduled, data: st.DataObject) -> None:
    schedule, _, placement = case
    worker_steps, n = schedule.on(placement), len(schedule)
    seconds = data.draw(st.lists(st.fixed_dictionaries(dict.fromkeys(Kind, SECONDS)), min_size=n, max_size=n))
    hops = data.draw(st.lists(SECONDS, min_size=n, max_size=n))
    present = {step for steps in worker_steps for step in steps}
    spans = replay(worker_steps, seconds, hops)
    assert spans.keys() == present
    for steps in worker_steps:
        clock = 0.0
        for step in steps:
            source = needs(step, present)
            arrival = 0.0 if source is None else spans[source].end + hops[max(source.stage, step.stage)]
            start = max(clock, arrival)
            assert spans[step] == Span(start, start + seconds[step.stage][step.action.kind], start - clock)
            clock = spans[step].end


@given(shuffled())
def test_replay_fails_only_on_deadlocks(programs: list[Program]) -> None:
    worker_steps = tuple(tuple(Step(j, action) for action in program) for j, program in enumerate(programs))
    done = executed(worker_steps)
    if len(done) == sum(map(len, worker_steps)):
        assert (
            len(replay(worker_steps))
            == len(done)
            == len(Schedule(programs).on(range(len(programs)))[0]) * len(programs)
        )
        return
    stuck = [next(step for step in steps if step not in done) for steps in worker_steps if not set(steps) <= set(done)]
    for run in (lambda: replay(worker_steps), lambda: Schedule(programs).on(range(len(programs)))):
        with pytest.raises(ValueError, match=r"wait for each other forever: ") as caught:
            run()
        told = str(caught.value).split(": ", 1)[1].split(", ")
        assert sorted(each.split(" for ")[0] for each in told) == sorted(map(str, stuck))


@fewer
@given(problems(), st.data())
def test_the_makespan_of_a_simulation(problem: Problem, data: st.DataObject):
    schedule, costs, placement = problem
    modes = data.draw(st.none() | MODES | st.lists(MODES, min_size=len(costs), max_size=len(costs)))
    transfer = data.draw(exact_seconds | st.builds(Link, exact_seconds, st.sampled_from([16.0, float("inf")])))
    given = {"checkpoint": modes, "transfer": transfer}
    own = {**given, "placement": placement}
    assert makespan(schedule, costs, **own) == simulate(schedule, costs, **own).makespan
    named = {**given, "microbatches": data.draw(st.integers(0, 6))}
    name = data.draw(st.sampled_from([name for name in SCHEDULES if name not in V_SHAPED or len(costs) % 2 == 0]))
    assert makespan(name, costs, **named) == simulate(name, costs, **named).makespan


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"checkpoint": "sometimes"},
            "checkpoint: expected one of 'always', 'except_last', 'never', 'offload', got 'sometimes'",
        ),
        ({"checkpoint": ["never"]}, r"checkpoint: expected one mode per stage \(2\), got 1"),
        ({"placement": [0]}, r"placement: expected one per stage of the schedule \(2\), got 1"),
    ],
)
def test_wrong_arguments(given: dict[str, object], message: str):
    for run in (simulate, makespan):
        with pytest.raises(ValueError, match=message):
            run("1f1b", [StageCost(1, 1)] * 2, microbatches=2, **given)
