"""Stages in loops over the workers: bubbles and memory as published, and as without loops where there are none."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import Kind, Schedule, Step, interleaved, interleaved_zero_bubble, looped_bfs, looped_placement

from ..schedules import held, idle, spans_of

MAKERS = (interleaved, interleaved_zero_bubble, looped_bfs)
counts = st.integers(1, 9)
workers = st.integers(1, 4)
loops = st.integers(1, 3)


def on(schedule: Schedule, k: int) -> tuple[tuple[Step, ...], ...]:
    return schedule.on(looped_placement(len(schedule), k))


class TestAll:
    @given(st.sampled_from(MAKERS), st.integers(0, 5), st.integers(0, 9), st.integers(-2, 9))
    def test_stages_go_evenly_on_one_worker_or_more_or_are_refused(self, make: object, m: int, n: int, k: int) -> None:
        if k > 0 and n % k == 0:
            assert len(make(m, n, k)) == n
            return
        with pytest.raises(ValueError, match=f"{n} stages do not go evenly on {k} workers"):
            make(m, n, k)


class TestInterleaved:
    @given(counts, workers, loops, st.data())
    def test_a_worker_holds_no_more_than_is_promised(self, m: int, k: int, v: int, data: st.DataObject) -> None:
        schedule = interleaved(m, k * v, k, data.draw(st.integers(0, m)))
        for r, steps in enumerate(on(schedule, k)):
            changes = [{Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(step.action.kind, 0) for step in steps]
            promised = 2 * (k - r - 1) + (v - 1) * k + 1
            assert max(accumulate(changes)) <= promised
            if m % k == 0:
                assert max(accumulate(changes)) == min(m * v, promised)


class TestLoopedBFS:
    @given(counts, workers, loops, st.integers(1, 5), st.integers(1, 5))
    def test_the_bubble_is_that_of_fill_drain_with_stages_a_loop_as_small(
        self, m: int, k: int, v: int, f: int, b: int
    ) -> None:
        spans = spans_of(on(looped_bfs(m, k * v, k), k), f, b, 0)
        ends = max(span.end for span in spans.values())
        assert ends - v * m * (f + b) == (k - 1 + (v - 1) * max(0, k - m)) * (f + b)  # k − 1 for m ≥ k

    @given(counts, workers, loops)
    def test_a_stage_does_all_micro_batches_in_one_piece_each_way(self, m: int, k: int, v: int) -> None:
        walk = on(looped_bfs(m, k * v, k), k)
        assert held(walk) == [v * m] * k
        for steps in walk:
            runs = [steps[first : first + m] for first in range(0, len(steps), m)]
            assert all(len({(step.stage, step.action.kind) for step in run}) == 1 for run in runs)


class TestInterleavedZeroBubble:
    @given(st.integers(1, 3), workers, loops, st.tuples(*[st.integers(1, 9)] * 3))
    def test_the_bubble_is_that_of_zero_bubble_with_stages_a_loop_as_small(
        self, groups: int, k: int, v: int, seconds: tuple[int, int, int]
    ) -> None:
        w, i, f = sorted(seconds)
        walk = on(interleaved_zero_bubble(groups * k, k * v, k), k)
        assert idle(walk, f, i, w) == (k - 1) * (f + i - w)

    @given(st.integers(1, 3), workers, loops, st.integers(1, 9), st.integers(1, 9))
    def test_the_bubble_where_nothing_is_split_is_that_of_interleaved(
        self, groups: int, k: int, v: int, f: int, b: int
    ) -> None:
        schedules = (interleaved_zero_bubble(groups * k, k * v, k, split=()), interleaved(groups * k, k * v, k))
        assert [idle(on(schedule, k), f, b, 0) for schedule in schedules] == [(k - 1) * (f + b)] * 2

    @given(counts, workers, loops)
    def test_a_worker_holds_as_much_as_as_many_stages_as_there_are_workers(self, m: int, k: int, v: int) -> None:
        most = held(on(interleaved_zero_bubble(m, k * v, k), k))
        assert max(most) <= k * v
        if m % k == 0:
            assert most == [k * v] * k
