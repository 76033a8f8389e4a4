"""Lifetimes hold for any durations, and buffers are as few as can be."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, groupby, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpipe.schedule import (
    Action,
    Kind,
    Lifetime,
    Schedule,
    Span,
    Step,
    fill_drain,
    halves,
    in_flight,
    lifetimes,
    one_forward_one_backward,
    replay,
    requirement,
    slots,
    zbv,
    zero_bubble,
)

from .schedules import fitting, held, orders, runs, scheduled, sizes

pytestmark = pytest.mark.timeout(60)

Problem = tuple[Schedule, int, list[int]]
problems = scheduled() | orders()
durations = st.integers(0, 4)

intervals = st.builds(
    lambda stage, first, more: Lifetime("activation", stage, 0, first, first + more),
    st.integers(0, 9), st.integers(0, 9), st.integers(0, 9),
)  # fmt: skip


def overlaps(lifetimes: Iterable[Lifetime]) -> int:
    """The most that are held at once."""
    lifetimes = list(lifetimes)
    return max(
        (sum(each.first <= k <= each.last for each in lifetimes) for k in {x.first for x in lifetimes}), default=0
    )


def of(held: str, worker: Iterable[Lifetime]) -> list[Lifetime]:
    return [each for each in worker if each.held == held]


def buffers(lifetimes: Iterable[Lifetime]) -> int:
    return len(set(slots(lifetimes).values()))


class TestSlots:
    @given(st.lists(intervals, unique=True))
    def test_none_overlaps_another_one_in_its_buffer(self, lifetimes: list[Lifetime]) -> None:
        found = slots(lifetimes)
        assert set(found) == set(lifetimes)
        for one, other in combinations(lifetimes, 2):
            assert found[one] != found[other] or one.last < other.first or other.last < one.first

    @given(st.lists(intervals, unique=True))
    def test_there_are_as_many_as_are_held_at_once(self, lifetimes: list[Lifetime]) -> None:
        assert set(slots(lifetimes).values()) == set(range(overlaps(lifetimes)))

    @given(problems, st.randoms(use_true_random=False))
    def test_their_order_does_not_matter_where_they_begin_one_by_one(self, problem: Problem, random: object) -> None:
        schedule, _, placement = problem
        for worker in lifetimes(schedule, placement):
            shuffled = of("activation", worker)
            random.shuffle(shuffled)
            assert slots(shuffled) == slots(of("activation", worker))


class TestLifetimes:
    @given(problems)
    def test_each_micro_batch_of_each_stage_has_its_own(self, problem: Problem) -> None:
        schedule, m, placement = problem
        found = lifetimes(schedule, placement)
        n = len(placement)
        expected = {("activation", j, i) for j in range(n) for i in range(m)}
        expected |= {("input", j, i) for j in range(1, n) for i in range(m)}
        expected |= {("gradient", j, i) for j in range(n - 1) for i in range(m)}
        assert sorted(each[:3] for worker in found for each in worker) == sorted(expected)
        assert all(placement[each.stage] == k for k, worker in enumerate(found) for each in worker)
        assert all([x.first for x in worker] == sorted(x.first for x in worker) for worker in found)

    @given(problems)
    def test_an_activation_lasts_from_what_makes_it_to_the_last_backward_that_reads_it(self, problem: Problem) -> None:
        schedule, _, placement = problem
        for worker, steps in zip(lifetimes(schedule, placement), schedule.on(placement), strict=True):
            for _, stage, i, first, last in of("activation", worker):
                own = [step.action.kind for step in steps if (step.stage, step.action.microbatch) == (stage, i)]
                assert steps[first].action.kind == (Kind.RECOMPUTE if Kind.RECOMPUTE in own else Kind.FORWARD)
                assert steps[last].action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
                assert steps[first][0] == steps[last][0] == stage
                assert steps[first][1][1] == steps[last][1][1] == i

    @given(problems, st.data())
    def test_no_two_share_a_buffer_at_a_time_however_long_steps_take(
        self, problem: Problem, data: st.DataObject
    ) -> None:
        schedule, _, placement = problem
        walk = schedule.on(placement)
        taken = {step: data.draw(durations) for steps in walk for step in steps}
        spans = replay(walk, taken.__getitem__, lambda source, target: taken[source] % 2)
        for worker, steps in zip(lifetimes(schedule, placement), walk, strict=True):
            for kind in ("input", "gradient", "activation"):
                found = slots(of(kind, worker))
                times = sorted((buffer, _time(each, steps, spans)) for each, buffer in found.items())
                for _, one in groupby(times, key=lambda each: each[0]):
                    each = [time for _, time in one]
                    assert all(before[1] <= after[0] for before, after in pairwise(each))

    @given(problems)
    def test_what_others_send_may_be_there_as_early_as_it_says(self, problem: Problem) -> None:
        """Where the worker takes for ever from that step on, and nobody else takes any time."""
        schedule, _, placement = problem
        walk = schedule.on(placement)
        for worker, steps in zip(lifetimes(schedule, placement), walk, strict=True):
            for each in [*of("input", worker), *of("gradient", worker)]:
                slow = set(steps[each.first :])
                spans = replay(walk, lambda step, slow=slow: step in slow)
                assert _time(each, steps, spans)[0] <= spans[steps[each.first]].end

    @given(runs())
    def test_forwards_alone_need_an_activation_while_they_run(self, run: tuple[int, int, int]) -> None:
        m, n, _ = run
        for worker in lifetimes(halves(fill_drain(m, n))[0], range(n)):
            assert all(each.first == each.last for each in of("activation", worker))

    def test_workers_that_wait_for_ever_are_refused(self) -> None:
        with pytest.raises(ValueError, match="forever"):
            lifetimes(Schedule.parse("F0 B0 F1 B1\nF1 B1 F0 B0"), [0, 1])


def _time(each: Lifetime, steps: tuple[Step, ...], spans: dict[Step, Span]) -> tuple[float, float]:
    """From when to when it is held, without the way between two workers."""
    end = spans[steps[each.last]].end
    if each.held == "activation":
        return spans[steps[each.first]].start, end
    kinds = (Kind.FORWARD,) if each.held == "input" else (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    consumers = [Step(each.stage, Action(kind, each.microbatch)) for kind in kinds]
    made = [spans[needed] for step in consumers if step in spans for needed in requirement(step) if needed in spans]
    (span,) = made
    return span.end, end


class TestPublished:
    """Buffers for activations are the micro-batches in flight."""

    @given(sizes)
    def test_1f1b(self, size: tuple[int, int]) -> None:
        m, n = size
        found = lifetimes(one_forward_one_backward(m, n), range(n))
        assert [buffers(of("activation", worker)) for worker in found] == [min(m, n - j) for j in range(n)]
        # One more may arrive while the worker is still busy with the others.
        assert [buffers(of("input", worker)) for worker in found][1:] == [min(m, n - j + 1) for j in range(1, n)]

    @given(sizes)
    def test_fill_drain(self, size: tuple[int, int]) -> None:
        m, n = size
        found = lifetimes(fill_drain(m, n), range(n))
        assert [buffers(of("activation", worker)) for worker in found] == [m] * n
        assert [buffers(of("input", worker)) for worker in found] == [0, *[m] * (n - 1)]

    @given(sizes)
    def test_zero_bubble(self, size: tuple[int, int]) -> None:
        m, n = size
        for worker, program in zip(lifetimes(zero_bubble(m, n), range(n)), zero_bubble(m, n), strict=True):
            assert buffers(of("activation", worker)) == in_flight(program) <= n

    @given(st.integers(1, 12), st.integers(1, 4))
    def test_both_stages_of_a_v_share_as_many_as_there_are_stages(self, m: int, k: int) -> None:
        placement = fitting("zbv", k, 1)
        for worker in lifetimes(zbv(m, 2 * k), placement):
            assert buffers(of("activation", worker)) <= 2 * k

    @given(problems)
    @example((fill_drain(3, 2, 3), 3, [0, 1]))
    def test_any_without_recomputations(self, problem: Problem) -> None:
        schedule, _, placement = problem
        walk = [[step for step in steps if step.action.kind != Kind.RECOMPUTE] for steps in schedule.on(placement)]
        programs = [[step.action for steps in walk for step in steps if step.stage == j] for j in range(len(placement))]
        found = lifetimes(Schedule(programs, tuple(map(tuple, walk))), placement)
        assert [buffers(of("activation", worker)) for worker in found] == held(walk)
