"""The schedules of the literature: complete, in order, free of deadlocks, and as short as can be."""

from collections import Counter
from itertools import chain, product
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import (
    Schedule,
    Walk,
    clock_cycles,
    fill_drain,
    halves,
    in_flight,
    named,
    one_forward_one_backward,
    replay,
    validate,
    zero_bubble,
)

from ..schedules import Scheduled, counts, executed, names, scheduled, sizes, steps_of


def makespan(walk: Walk) -> float:
    """In ticks."""
    return max(span.end for span in replay(walk).values())


@given(sizes)
def test_a_tick_is_a_diagonal_of_cells(size: tuple[int, int]) -> None:
    ticks = list(clock_cycles(*size))
    assert len(ticks) == sum(size) - 1
    assert Counter(chain.from_iterable(ticks)) == Counter(product(range(size[0]), range(size[1])))
    assert all(i + j == tick for tick, cells in enumerate(ticks) for i, j in cells)


@given(sizes)
def test_both_ways_of_fill_drain_take_the_shortest_time(size: tuple[int, int]) -> None:
    """Recomputations hide behind the backwards of other stages."""
    m, n = size
    for half in halves(fill_drain(m, n)):
        assert makespan(half.on(range(n))) == m + n - 1
    _, backwards = halves(fill_drain(m, n, checkpoint_stop=m))
    assert makespan(backwards.on(range(n))) == 2 * m + n - 1


@given(scheduled())
def test_every_schedule_is_valid(problem: Scheduled) -> None:
    schedule, m, placement = problem
    validate(schedule, m, placement)


@given(names(), counts, st.data())
def test_each_stage_may_have_a_stop_of_its_own(case: tuple[str, list[int]], m: int, data: st.DataObject) -> None:
    name, placement = case
    stops = data.draw(st.lists(st.integers(0, m), min_size=len(placement), max_size=len(placement)))
    found = named(name, m, placement, stops)
    assert found == named(name, m, placement).recomputing(stops)
    assert [sum(a.kind == "recompute" for a in program) for program in found] == stops
    assert named(name, m, placement, stops[0]) == named(name, m, placement, [stops[0]] * len(placement))


@given(scheduled(), st.randoms(use_true_random=False))
def test_no_placement_makes_a_schedule_wait_for_ever(problem: Scheduled, random: Random) -> None:
    schedule, _, placement = problem
    workers = [random.randrange(3) for _ in placement]
    assert Counter(executed(schedule.on(workers))) == Counter(steps_of(schedule))


@given(scheduled())
def test_the_text_of_a_schedule_reads_back(problem: Scheduled) -> None:
    schedule, _, placement = problem
    again = Schedule.parse(str(schedule))
    assert again == schedule
    assert again.on(placement) == schedule.on(placement)


@given(sizes, st.integers(0, 7))
def test_what_stages_hold_at_most(size: tuple[int, int], stop: int) -> None:
    m, n = size
    held = [in_flight(program) for program in one_forward_one_backward(m, n, min(stop, m))]
    assert held == [min(m, n - j) for j in range(n)]
    assert all(in_flight(program) <= n for program in zero_bubble(m, n))
    assert Schedule(tuple(fill_drain(m, n))) == fill_drain(m, n)  # its programs say all of it
