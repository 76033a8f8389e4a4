"""What workers walk: every step once, on the worker of its stage, in an order in which nobody waits for ever."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from gpipe.engine._walks import forwards_and_backwards, walk_of
from gpipe.schedule import Kind, Step, Walk, replay

from ..schedules import CHOICES, some_schedule

SIZES = st.integers(1, 4)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, ...]:
    """Stages on workers, of which none is left out."""
    found = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    return tuple(sorted(set(found)).index(worker) for worker in found)


@st.composite
def stops(draw: st.DrawFn, microbatches: int, stages: int) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, microbatches), min_size=stages, max_size=stages)))


def assert_in_place(walk: Walk, placement: tuple[int, ...]) -> None:
    assert all(placement[step.stage] == worker for worker, steps in enumerate(walk) for step in steps)
    assert len(replay(walk)) == sum(map(len, walk))  # each once, and none waits for ever


def recomputed(walk: Walk) -> set[tuple[int, int]]:
    return {(stage, i) for stage, (kind, i) in chain.from_iterable(walk) if kind == Kind.RECOMPUTE}


@given(CHOICES, SIZES, placements(), st.data())
def test_a_schedule_of_ones_own(choices: tuple[int, ...], m: int, placement: tuple[int, ...], data: st.DataObject):
    below = data.draw(stops(m, len(placement)))
    schedule = some_schedule(choices, m, placement, 0)
    walk = walk_of(schedule, m, below, placement)
    assert_in_place(walk, placement)
    assert recomputed(walk) == {(j, i) for j, stop in enumerate(below) for i in range(stop)}
    steps = {step for step in chain.from_iterable(walk) if step.action.kind != Kind.RECOMPUTE}
    assert steps == {Step(j, action) for j, program in enumerate(schedule) for action in program}


@given(SIZES, placements(), st.data())
def test_the_walks_of_a_forward_and_a_backward(m: int, placement: tuple[int, ...], data: st.DataObject):
    below = data.draw(stops(m, len(placement)))
    forwards, backwards = forwards_and_backwards(m, below, placement)
    both = [(*first, *second) for first, second in zip(forwards, backwards, strict=True)]
    assert_in_place(tuple(both), placement)
    assert {step.action.kind for step in chain.from_iterable(forwards)} == {Kind.FORWARD}
    assert Kind.FORWARD not in {step.action.kind for step in chain.from_iterable(backwards)}
    assert recomputed(backwards) == {(j, i) for j, stop in enumerate(below) for i in range(stop)}
