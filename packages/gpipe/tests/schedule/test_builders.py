"""The schedules of the literature: complete, in order, free of deadlocks, and as short as can be."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import (
    Action,
    Schedule,
    Walk,
    clock_cycles,
    fill_drain,
    halves,
    in_flight,
    one_forward_one_backward,
    replay,
    validate,
    zero_bubble,
)

from ..schedules import executed, runs, scheduled, sizes, steps_of


def makespan(walk: Walk) -> float:
    """In ticks."""
    return max(span.end for span in replay(walk).values())


class TestClockCycles:
    @given(sizes)
    def test_each_cell_runs_once(self, size: tuple[int, int]) -> None:
        m, n = size
        cells = Counter(chain.from_iterable(clock_cycles(m, n)))
        assert cells == Counter((i, j) for i in range(m) for j in range(n))

    @given(sizes)
    def test_a_tick_is_a_diagonal(self, size: tuple[int, int]) -> None:
        assert all(i + j == tick for tick, cells in enumerate(clock_cycles(*size)) for i, j in cells)

    @given(sizes)
    def test_there_are_as_many_ticks_as_the_longest_way_has_cells(self, size: tuple[int, int]) -> None:
        assert len(list(clock_cycles(*size))) == sum(size) - 1


class TestFillDrain:
    @given(runs())
    def test_a_graph_is_rebuilt_no_earlier_than_it_must(self, run: tuple[int, int, int]) -> None:
        for program in fill_drain(*run):
            for here, following in pairwise(program):
                assert here.kind != "recompute" or following == Action("backward", here.microbatch)

    @given(sizes)
    def test_both_ways_take_the_shortest_time(self, size: tuple[int, int]) -> None:
        for half in halves(fill_drain(*size)):
            assert makespan(half.on(range(size[1]))) == sum(size) - 1

    @given(sizes)
    def test_recomputations_hide_behind_the_backwards_of_other_stages(self, size: tuple[int, int]) -> None:
        m, n = size
        _, backwards = halves(fill_drain(m, n, checkpoint_stop=m))
        assert makespan(backwards.on(range(n))) == 2 * m + n - 1


class TestEverySchedule:
    @given(scheduled())
    def test_it_is_valid(self, problem: tuple[Schedule, int, list[int]]) -> None:
        schedule, m, placement = problem
        validate(schedule, m, placement)

    @given(scheduled(), st.randoms(use_true_random=False))
    def test_no_placement_makes_it_wait_for_ever(
        self, problem: tuple[Schedule, int, list[int]], random: Random
    ) -> None:
        schedule, _, placement = problem
        workers = [random.randrange(3) for _ in placement]
        assert Counter(executed(schedule.on(workers))) == Counter(steps_of(schedule))

    @given(scheduled())
    def test_its_text_reads_back(self, problem: tuple[Schedule, int, list[int]]) -> None:
        schedule, _, placement = problem
        again = Schedule.parse(str(schedule))
        assert again == schedule
        assert again.on(placement) == schedule.on(placement)

    @given(sizes, st.integers(0, 7))
    def test_one_forward_one_backward_holds_no_more_than_the_stages_behind(
        self, size: tuple[int, int], stop: int
    ) -> None:
        m, n = size
        held = [in_flight(program) for program in one_forward_one_backward(m, n, min(stop, m))]
        assert held == [min(m, n - j) for j in range(n)]

    @given(sizes)
    def test_one_forward_one_backward_takes_no_longer_than_fill_drain(self, size: tuple[int, int]) -> None:
        ends = [makespan(make(*size).on(range(size[1]))) for make in (fill_drain, one_forward_one_backward)]
        assert ends[0] == ends[1] == 2 * (sum(size) - 1)

    @given(sizes)
    def test_zero_bubble_holds_no_more_than_the_stages(self, size: tuple[int, int]) -> None:
        assert all(in_flight(program) <= size[1] for program in zero_bubble(*size))
