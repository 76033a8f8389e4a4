"""The schedules of the literature: complete, in order, free of deadlocks, and as short as can be."""

from collections import Counter
from itertools import accumulate, chain, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import (
    Kind,
    Schedule,
    Step,
    WorkerSteps,
    clock_cycles,
    fill_drain,
    in_flight,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    looped_placement,
    named,
    one_forward_one_backward,
    replay,
    split_forward_backward,
    validate,
    zero_bubble,
)

from ..schedules import Scheduled, counts, executed, held, idle, names, scheduled, sizes, spans_of, steps_of


def makespan(worker_steps: WorkerSteps) -> float:
    """In ticks."""
    return max(span.end for span in replay(worker_steps).values())


@given(sizes)
def test_a_tick_is_a_diagonal_of_cells(size: tuple[int, int]) -> None:
    ticks = list(clock_cycles(*size))
    assert len(ticks) == sum(size) - 1
    assert Counter(chain.from_iterable(ticks)) == Counter(product(range(size[0]), range(size[1])))
    assert all(i + j == tick for tick, cells in enumerate(ticks) for i, j in cells)


@given(sizes)
def test_fill_drain_has_optimal_makespan(size: tuple[int, int]) -> None:
    """Recomputations hide behind the backwards of other stages."""
    m, n = size
    for half in split_forward_backward(fill_drain(m, n)):
        assert makespan(half.on(range(n))) == m + n - 1
    _, backwards = split_forward_backward(fill_drain(m, n, checkpoint_stop=m))
    assert makespan(backwards.on(range(n))) == 2 * m + n - 1


@given(scheduled())
def test_every_schedule_is_valid(problem: Scheduled) -> None:
    schedule, m, placement = problem
    validate(schedule, m, placement)


@given(names(), counts, st.data())
def test_stages_may_have_different_checkpoint_stops(case: tuple[str, list[int]], m: int, data: st.DataObject) -> None:
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


MAKERS = (interleaved, interleaved_zero_bubble, looped_bfs)
counts = st.integers(1, 9)
workers = st.integers(1, 4)
loops = st.integers(1, 3)


def on(schedule: Schedule, k: int) -> tuple[tuple[Step, ...], ...]:
    return schedule.on(looped_placement(len(schedule), k))


@given(st.sampled_from(MAKERS), st.integers(0, 5), st.integers(0, 9), st.integers(-2, 9))
def test_number_of_stages_must_be_divisible(make: object, m: int, n: int, k: int) -> None:
    if k > 0 and n % k == 0:
        assert len(make(m, n, k)) == n
        return
    with pytest.raises(ValueError, match=f"{n} is not divisible by {k}; choose"):
        make(m, n, k)


@given(counts, workers, loops, st.data())
def test_interleaved_holds_no_more_than_is_promised(m: int, k: int, v: int, data: st.DataObject) -> None:
    schedule = interleaved(m, k * v, k, data.draw(st.integers(0, m)))
    for r, steps in enumerate(on(schedule, k)):
        changes = [{Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(step.action.kind, 0) for step in steps]
        promised = 2 * (k - r - 1) + (v - 1) * k + 1
        assert max(accumulate(changes)) <= promised
        if m % k == 0:
            assert max(accumulate(changes)) == min(m * v, promised)


@given(counts, workers, loops, st.integers(1, 5), st.integers(1, 5))
def test_looped_bfs_bubble_matches_formula(m: int, k: int, v: int, f: int, b: int) -> None:
    spans = spans_of(on(looped_bfs(m, k * v, k), k), f, b, 0)
    ends = max(span.end for span in spans.values())
    assert ends - v * m * (f + b) == (k - 1 + (v - 1) * max(0, k - m)) * (f + b)  # k − 1 for m ≥ k


@given(counts, workers, loops)
def test_looped_bfs_runs_stages_contiguously(m: int, k: int, v: int) -> None:
    worker_steps = on(looped_bfs(m, k * v, k), k)
    assert held(worker_steps) == [v * m] * k
    for steps in worker_steps:
        runs = [steps[first : first + m] for first in range(0, len(steps), m)]
        assert all(len({(step.stage, step.action.kind) for step in run}) == 1 for run in runs)


@given(st.integers(1, 3), workers, loops, st.tuples(*[st.integers(1, 9)] * 3))
def test_interleaved_zero_bubble_matches_formula(groups: int, k: int, v: int, seconds: tuple[int, int, int]) -> None:
    w, i, f = sorted(seconds)
    worker_steps = on(interleaved_zero_bubble(groups * k, k * v, k), k)
    assert idle(worker_steps, f, i, w) == (k - 1) * (f + i - w)


@given(st.integers(1, 3), workers, loops, st.integers(1, 9), st.integers(1, 9))
def test_interleaved_zero_bubble_without_splits(groups: int, k: int, v: int, f: int, b: int) -> None:
    schedules = (interleaved_zero_bubble(groups * k, k * v, k, split=()), interleaved(groups * k, k * v, k))
    assert [idle(on(schedule, k), f, b, 0) for schedule in schedules] == [(k - 1) * (f + b)] * 2


@given(counts, workers, loops)
def test_interleaved_zero_bubble_memory(m: int, k: int, v: int) -> None:
    most = held(on(interleaved_zero_bubble(m, k * v, k), k))
    assert max(most) <= k * v
    if m % k == 0:
        assert most == [k * v] * k
