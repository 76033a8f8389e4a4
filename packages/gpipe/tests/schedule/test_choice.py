"""The choice of a schedule and of split backwards, given the times of cells."""

from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import (
    CHOICE_TOLERANCE,
    SPLIT_SECONDS,
    Choice,
    Kind,
    Seconds,
    choose,
    in_flight,
    named,
    validate,
    worth_splitting,
)
from gpipe.schedule._choice import choose_by_search
from gpipe.simulate import StageCost, simulate

PLACEMENTS = st.one_of(
    st.integers(1, 4).map(lambda n: tuple(range(n))), st.integers(1, 4).map(lambda n: tuple(j % 2 for j in range(n)))
)
SECONDS = st.floats(SPLIT_SECONDS / 8, SPLIT_SECONDS * 8)
BY_MEMORY = ("1f1b", "zero_bubble", "fill_drain")


class Case(NamedTuple):
    microbatches: int
    placement: tuple[int, ...]
    checkpoint_stop: int
    seconds: Seconds
    may_split: tuple[int, ...]

    def schedule(self, choice: Choice) -> Any:
        return named(choice.name, self.microbatches, self.placement, self.checkpoint_stop, choice.split)

    def costs(self) -> list[StageCost]:
        stages = range(len(self.placement))
        return [StageCost(**{kind.value: self.seconds.get((j, kind)) for kind in Kind}) for j in stages]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    m, placement = draw(st.integers(1, 6)), draw(PLACEMENTS)
    stages = range(len(placement))
    known: dict[tuple[int, Kind], float] = {}
    for j in stages:
        parts = [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if draw(st.booleans()) else []
        more = [Kind.RECOMPUTE] if draw(st.booleans()) else []
        known.update({(j, kind): draw(SECONDS) for kind in (Kind.FORWARD, Kind.BACKWARD, *parts, *more)})
    may_split = tuple(j for j in stages if draw(st.booleans()))
    return Case(m, placement, draw(st.sampled_from([0, m - 1, m])), known, may_split)


@given(cases())
def test_choose_is_fastest_with_least_memory(case: Case):
    """Times are simulated. All backwards that may be split are split if it helps."""
    choice = choose(*case)
    assert set(choice.seconds) == set(BY_MEMORY)
    fastest = min(choice.seconds.values())
    ties = [name for name in BY_MEMORY if choice.seconds[name] <= fastest * (1 + CHOICE_TOLERANCE)]
    assert choice.name == ties[0]
    makespan = simulate(case.schedule(choice), case.costs(), placement=case.placement).makespan
    assert choice.seconds[choice.name] == makespan
    assert set(choice.split) <= set(case.may_split)
    assert all(case.seconds[j, Kind.BACKWARD] >= SPLIT_SECONDS for j in choice.split)
    assert choice.name == "zero_bubble" or not choice.split
    assert choice.name != "zero_bubble" or choice.split  # it would be 1F1B
    validate(case.schedule(choice), case.microbatches, case.placement)


@given(cases(), st.data())
def test_choice_requires_all_times(case: Case, data: st.DataObject):
    unknown = data.draw(st.sampled_from([cell for cell in case.seconds if cell[1] in ("forward", "backward")]))
    seconds = {cell: each for cell, each in case.seconds.items() if cell != unknown}
    assert choose(*case._replace(seconds=seconds)) == Choice("1f1b")


def test_parts_that_are_known_count_instead_of_halves():
    assert worth_splitting({(0, Kind.BACKWARD_INPUT): 1e-3, (0, Kind.BACKWARD_WEIGHT): 0.5e-3}, [0]) == ()
    assert worth_splitting({(0, Kind.BACKWARD_INPUT): 1e-3, (0, Kind.BACKWARD_WEIGHT): 1e-3}, [0]) == (0,)
    assert worth_splitting({(0, Kind.BACKWARD_INPUT): 1e-3}, [0]) == (0,)
    assert worth_splitting({}, [1, 0]) == (0, 1)


@given(cases())
def test_unsplit_stages_follow_1f1b(case: Case):
    m, n = case.microbatches, len(case.placement)
    some, none, every = (
        named("zero_bubble", m, case.placement, case.checkpoint_stop, split) for split in (case.may_split, (), None)
    )
    assert none == named("1f1b", m, case.placement, case.checkpoint_stop)
    assert [some[j] for j in range(n)] == [(every if j in case.may_split else none)[j] for j in range(n)]
    validate(some, m, case.placement)
    assert all(in_flight(program) <= (n if j in case.may_split else n - j) for j, program in enumerate(some))


@given(cases())
def test_search_matches_zero_bubble(case: Case):
    """The limit of each worker is zero bubble's peak over all workers."""
    choice = choose_by_search(*case)
    usual = next(name for name in choice.seconds if name != "search")
    assert choice.name == "search"
    assert choice.schedule is not None
    validate(choice.schedule, case.microbatches, case.placement)
    assert choice.seconds["search"] <= choice.seconds[usual]
    assert simulate(choice.schedule, case.costs(), placement=case.placement).makespan == choice.seconds["search"]
    split = worth_splitting(case.seconds, case.may_split)
    assert set(choice.split) <= set(split)
    step_lists = [
        each.on(case.placement)
        for each in (choice.schedule, named(usual, case.microbatches, case.placement, case.checkpoint_stop, split))
    ]
    ours, theirs = (
        max(in_flight(tuple(step.action for step in steps)) for steps in worker_steps) for worker_steps in step_lists
    )
    assert ours <= theirs


@given(cases(), st.data())
def test_before_a_search_zero_bubble_is_measured(case: Case, data: st.DataObject):
    unknown = data.draw(st.sampled_from(range(len(case.placement))))
    seconds = {cell: each for cell, each in case.seconds.items() if cell != (unknown, Kind.FORWARD)}
    choice = choose_by_search(*case._replace(seconds=seconds))
    assert choice.schedule is None
    assert choice.split == (() if choice.name == "1f1b" else case.may_split)
    assert (choice.name == "1f1b") == (len(set(case.placement)) == 1)
