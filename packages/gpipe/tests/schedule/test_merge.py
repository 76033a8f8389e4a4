"""Programs of several stages on one worker: each step as soon as what it needs is done."""

from __future__ import annotations

import pytest
from hypothesis import example, given

from gpipe.schedule import Action, Program, Step, merge, replay, start_ticks

from ..schedules import executed, needs, placed, shuffled, steps_of


class TestStartTicks:
    @given(placed())
    def test_what_is_needed_has_ended(self, problem: tuple[tuple[Program, ...], list[int]]) -> None:
        ticks = start_ticks(*problem)
        assert all(ticks[needed] < ticks[step] for step in ticks if (needed := needs(step, set(ticks))))

    @given(placed())
    def test_nobody_idles_who_could_work(self, problem: tuple[tuple[Program, ...], list[int]]) -> None:
        programs, placement = problem
        ticks = start_ticks(programs, placement)
        busy = {(placement[step.stage], tick) for step, tick in ticks.items()}
        for j, program in enumerate(programs):
            ready = 0
            for step in (Step(j, action) for action in program):
                needed = needs(step, set(ticks))
                ready = max(ready, ticks[needed] + 1 if needed else 0)
                assert all((placement[j], tick) in busy for tick in range(ready, ticks[step]))
                ready = ticks[step] + 1

    @given(shuffled())
    @example([(Action("backward", 0), Action("forward", 0)), (Action("forward", 0), Action("backward", 0))])
    def test_a_deadlock_is_found_exactly_where_workers_would_stand_still(self, programs: list[Program]) -> None:
        walks = [[Step(j, action) for action in program] for j, program in enumerate(programs)]
        done = set(executed(walks))
        stuck = [queue for queue in ([step for step in walk if step not in done] for walk in walks) if queue]
        if not stuck:
            assert set(start_ticks(programs, range(len(programs)))) == done
            return
        with pytest.raises(ValueError, match="wait for each other forever") as caught:
            start_ticks(programs, range(len(programs)))
        told = str(caught.value).split(": ", 1)[1].split(", ")
        present = set(steps_of(programs))
        assert sorted(told) == sorted(f"{step} for {needs(step, present)}" for step, *_ in stuck)
        with pytest.raises(ValueError, match="wait for each other forever"):
            replay(tuple(map(tuple, walks)))


class TestMerge:
    @given(placed())
    def test_every_step_is_on_the_worker_of_its_stage(self, problem: tuple[tuple[Program, ...], list[int]]) -> None:
        programs, placement = problem
        for worker, walk in enumerate(merge(programs, placement)):
            assert {placement[step.stage] for step in walk} <= {worker}

    @given(placed())
    def test_each_stage_keeps_to_its_program(self, problem: tuple[tuple[Program, ...], list[int]]) -> None:
        programs, placement = problem
        walks = merge(programs, placement)
        for j, program in enumerate(programs):
            assert tuple(action for stage, action in walks[placement[j]] if stage == j) == program
