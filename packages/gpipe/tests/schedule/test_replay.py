"""A replay: workers do their steps in order, each as soon as its input is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import Program, Schedule, Span, Step, Walk, replay

from ..schedules import executed, needs, orders, shuffled

SECONDS = st.integers(0, 5)


def walk_of(case: tuple[Schedule, int, list[int]]) -> Walk:
    schedule, _, placement = case
    return schedule.on(placement)


@given(orders(), st.lists(SECONDS, min_size=1), st.lists(SECONDS, min_size=1))
def test_each_step_begins_as_soon_as_it_can(case: tuple, durations: list[int], transfers: list[int]) -> None:
    walk = walk_of(case)
    present = {step for steps in walk for step in steps}
    number = {step: k for k, step in enumerate(sorted(present))}

    def duration(step: Step) -> int:
        return durations[number[step] % len(durations)]

    def transfer(source: Step, target: Step) -> int:
        return transfers[(number[source] + number[target]) % len(transfers)]

    spans = replay(walk, duration, transfer)
    assert spans.keys() == present
    for steps in walk:
        clock = 0.0
        for step in steps:
            source = needs(step, present)
            arrival = 0.0 if source is None else spans[source].end + transfer(source, step)
            start = max(clock, arrival)
            assert spans[step] == Span(start, start + duration(step), start - clock)
            clock = spans[step].end


@given(shuffled())
def test_it_fails_where_workers_wait_for_ever_and_only_there(programs: list[Program]) -> None:
    walk = tuple(tuple(Step(j, action) for action in program) for j, program in enumerate(programs))
    if len(executed(walk)) == sum(map(len, walk)):
        assert len(replay(walk)) == sum(map(len, walk))
    else:
        with pytest.raises(ValueError, match=r"wait for each other forever: .* for "):
            replay(walk)
