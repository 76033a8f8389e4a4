"""The programs: complete, in order, free of deadlocks wherever the stages are, and as short as can be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpipe.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Program,
    Schedule,
    Step,
    clock_cycles,
    fill_drain,
    halves,
    in_flight,
    interleaved,
    merge,
    named,
    one_forward_one_backward,
    replay,
    requirement,
    start_ticks,
    validate,
    zero_bubble,
)

from .schedules import CHOICES, some_schedule

pytestmark = pytest.mark.timeout(60)

counts = st.integers(1, 7)
sizes = st.tuples(counts, counts)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int]:
    """Micro-batches, stages, and how many of the micro-batches are checkpointed."""
    m, n = draw(sizes)
    return m, n, draw(st.integers(0, m))


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[Schedule, int, list[int]]:
    """Any schedule by its name, its micro-batches, and a worker for each stage that suits it."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    m, workers = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    loops = draw(st.integers(1, 3)) if name == "interleaved" else 1
    placement = list(range(workers)) * loops
    return named(name, m, placement, draw(st.integers(0, m))), m, placement


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[Program, ...], list[int]]:
    """Programs, whole or a half of them, and a worker for each stage."""
    programs = fill_drain(*draw(runs()))
    m, n, stop = draw(runs())
    others = [one_forward_one_backward(m, n, stop), zero_bubble(m, n, stop)]
    chosen = draw(st.sampled_from([programs, *halves(programs), *others]))
    return chosen, draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))


@st.composite
def shuffled(draw: st.DrawFn) -> list[Program]:
    """Programs in which every stage has its actions in an order of its own, sense or nonsense."""
    m, n, stop = draw(runs())
    return [tuple(draw(st.permutations(program))) for program in fill_drain(min(m, 3), min(n, 4), min(stop, 3))]


def steps_of(programs: tuple[Program, ...] | list[Program]) -> list[Step]:
    return [Step(j, action) for j, program in enumerate(programs) for action in program]


def needs(step: Step, present: set[Step]) -> Step | None:
    """The step of another stage that has to come first, if there is one."""
    return next((needed for needed in requirement(step) if needed in present), None)


def executed(walks: Sequence[Sequence[Step]]) -> list[Step]:
    """What workers get done that walk these steps and wait for what they need: a model of the links, without time."""
    present = set(chain.from_iterable(walks))
    queues = [list(walk) for walk in walks]
    done: list[Step] = []
    progress = True
    while progress:
        progress = False
        for queue in queues:
            while queue and needs(queue[0], present) in (None, *done):
                done.append(queue.pop(0))
                progress = True
    return done


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

    @given(sizes)
    def test_stages_ascend_within_a_tick(self, size: tuple[int, int]) -> None:
        assert all([j for _, j in cells] == sorted({j for _, j in cells}) for cells in clock_cycles(*size))

    @pytest.mark.parametrize("size", [(0, 0), (0, 3), (3, 0)])
    def test_nothing_takes_no_time(self, size: tuple[int, int]) -> None:
        assert list(clock_cycles(*size)) == []


class TestFillDrain:
    @given(runs())
    def test_each_cell_runs_once_each_way_and_checkpointed_ones_again(self, run: tuple[int, int, int]) -> None:
        m, n, stop = run
        expected = Counter(
            [Action("forward", i) for i in range(m)]
            + [Action("recompute", i) for i in range(stop)]
            + [Action("backward", i) for i in range(m)]
        )
        programs = fill_drain(m, n, stop)
        assert len(programs) == n
        assert all(Counter(program) == expected for program in programs)

    @given(runs())
    def test_forward_comes_before_recompute_before_backward(self, run: tuple[int, int, int]) -> None:
        for program in fill_drain(*run):
            for i in range(run[0]):
                kinds = [kind for kind, microbatch in program if microbatch == i]
                assert kinds == ["forward", *["recompute"] * (i < run[2]), "backward"]

    @given(runs())
    def test_a_graph_is_rebuilt_no_earlier_than_it_must(self, run: tuple[int, int, int]) -> None:
        for program in fill_drain(*run):
            for here, following in pairwise(program):
                assert here.kind != "recompute" or following == Action("backward", here.microbatch)

    @given(runs())
    def test_no_more_than_all_micro_batches_are_in_flight(self, run: tuple[int, int, int]) -> None:
        for program in fill_drain(*run):
            flying = peak = 0
            for kind, _ in program:
                flying += {"forward": 1, "recompute": 0, "backward": -1}[kind]
                peak = max(peak, flying)
            assert (peak, flying) == (run[0], 0)

    @given(sizes)
    def test_forwards_run_as_in_the_clock_cycles(self, size: tuple[int, int]) -> None:
        forwards, _ = halves(fill_drain(*size))
        ticks = start_ticks(forwards, range(size[1]))
        by_tick = [{(i, j) for (j, (_, i)), t in ticks.items() if t == tick} for tick in range(sum(size) - 1)]
        assert by_tick == [set(cells) for cells in clock_cycles(*size)]

    @given(sizes)
    def test_both_ways_take_the_shortest_time(self, size: tuple[int, int]) -> None:
        for half in halves(fill_drain(*size)):
            assert max(start_ticks(half, range(size[1])).values()) + 1 == sum(size) - 1

    @given(sizes)
    def test_recomputations_hide_behind_the_backwards_of_other_stages(self, size: tuple[int, int]) -> None:
        m, n = size
        _, backwards = halves(fill_drain(m, n, checkpoint_stop=m))
        assert max(start_ticks(backwards, range(n)).values()) + 1 == 2 * m + n - 1

    def test_nothing_is_a_program_too(self) -> None:
        assert fill_drain(0, 2) == ((), ())
        assert fill_drain(2, 0) == ()


class TestHalves:
    @given(runs())
    def test_together_they_are_the_whole(self, run: tuple[int, int, int]) -> None:
        programs = fill_drain(*run)
        assert tuple(a + b for a, b in zip(*halves(programs), strict=True)) == programs

    @given(runs())
    def test_the_first_has_the_forwards_and_nothing_else(self, run: tuple[int, int, int]) -> None:
        forwards, rest = halves(fill_drain(*run))
        assert all(kind == "forward" for program in forwards for kind, _ in program)
        assert all(kind != "forward" for program in rest for kind, _ in program)


class TestStartTicks:
    @given(placed())
    def test_every_step_starts(self, problem: tuple[tuple[Program, ...], list[int]]) -> None:
        programs, placement = problem
        assert Counter(start_ticks(programs, placement).keys()) == Counter(steps_of(programs))

    @given(placed())
    def test_what_is_needed_has_ended(self, problem: tuple[tuple[Program, ...], list[int]]) -> None:
        ticks = start_ticks(*problem)
        assert all(ticks[needed] < ticks[step] for step in ticks if (needed := needs(step, set(ticks))))

    @given(placed())
    def test_a_worker_does_one_thing_at_a_time(self, problem: tuple[tuple[Program, ...], list[int]]) -> None:
        programs, placement = problem
        ticks = start_ticks(programs, placement)
        assert max(Counter((placement[step.stage], tick) for step, tick in ticks.items()).values(), default=1) == 1

    @given(placed())
    def test_a_stage_keeps_to_its_program(self, problem: tuple[tuple[Program, ...], list[int]]) -> None:
        programs, placement = problem
        ticks = start_ticks(programs, placement)
        for j, program in enumerate(programs):
            own = [ticks[Step(j, action)] for action in program]
            assert own == sorted(set(own))

    @given(placed())
    def test_they_come_in_order_of_time_and_of_one_tick_the_last_stage_first(
        self, problem: tuple[tuple[Program, ...], list[int]]
    ) -> None:
        order = [(tick, -step.stage) for step, tick in start_ticks(*problem).items()]
        assert order == sorted(order)

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
        with pytest.raises(ValueError, match="wait for each other for ever") as caught:
            start_ticks(programs, range(len(programs)))
        told = str(caught.value).split(": ", 1)[1].split(", ")
        present = set(steps_of(programs))
        assert sorted(told) == sorted(f"{step} for {needs(step, present)}" for step, *_ in stuck)
        with pytest.raises(ValueError, match="wait for each other for ever"):
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

    @given(placed())
    def test_workers_that_wait_for_what_they_need_get_everything_done(
        self, problem: tuple[tuple[Program, ...], list[int]]
    ) -> None:
        programs, placement = problem
        assert Counter(executed(merge(programs, placement))) == Counter(steps_of(programs))

    @given(runs())
    def test_a_single_worker_never_waits(self, run: tuple[int, int, int]) -> None:
        for half in halves(fill_drain(*run)):
            (walk,) = merge(half, (0,) * len(half))
            place = {step: k for k, step in enumerate(walk)}
            assert all(place[needed] < k for step, k in place.items() if (needed := needs(step, set(place))))

    def test_no_stages_need_no_workers(self) -> None:
        assert merge((), ()) == ()


class TestEverySchedule:
    @given(scheduled())
    def test_it_is_valid(self, problem: tuple[Schedule, int, list[int]]) -> None:
        schedule, m, placement = problem
        validate(schedule, m, placement)

    @given(scheduled())
    def test_each_cell_runs_once_each_way(self, problem: tuple[Schedule, int, list[int]]) -> None:
        schedule, m, placement = problem
        assert len(schedule) == len(placement)
        for program in schedule:
            kinds = Counter(program)
            assert set(kinds.values()) == {1}
            for i in range(m):
                assert Action("forward", i) in kinds
                whole = Action("backward", i) in kinds
                halved = {Action("backward_input", i), Action("backward_weight", i)} & set(kinds)
                assert (whole, len(halved)) in ((True, 0), (False, 2))

    @given(scheduled())
    def test_workers_that_wait_for_what_they_need_get_everything_done(
        self, problem: tuple[Schedule, int, list[int]]
    ) -> None:
        schedule, _, placement = problem
        walk = schedule.on(placement)
        assert Counter(executed(walk)) == Counter(steps_of(schedule))
        assert set(replay(walk)) == set(steps_of(schedule))

    @given(scheduled(), st.randoms(use_true_random=False))
    def test_no_placement_makes_it_wait_for_ever(
        self, problem: tuple[Schedule, int, list[int]], random: Random
    ) -> None:
        schedule, _, placement = problem
        workers = [random.randrange(3) for _ in placement]
        assert Counter(executed(merge(schedule, workers))) == Counter(steps_of(schedule))

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
        ends = [
            max(span.end for span in replay(make(*size).on(range(size[1]))).values())
            for make in (fill_drain, one_forward_one_backward)
        ]
        assert ends[0] == ends[1] == 2 * (sum(size) - 1)

    @given(sizes)
    def test_zero_bubble_holds_no_more_than_the_stages(self, size: tuple[int, int]) -> None:
        assert all(in_flight(program) <= size[1] for program in zero_bubble(*size))

    @given(runs())
    def test_only_neighbours_wait_for_each_other_and_for_the_same_micro_batch(self, run: tuple[int, int, int]) -> None:
        for step in steps_of(fill_drain(*run)):
            direction = {"forward": -1, "recompute": 0, "backward": 1}[step.action.kind]
            assert {needed.stage for needed in requirement(step)} == ({step.stage + direction} if direction else set())
            assert {needed.action.microbatch for needed in requirement(step)} <= {step.action.microbatch}


@st.composite
def walked(draw: st.DrawFn) -> tuple[Schedule, list[int]]:
    """A schedule whose stages share workers, in any order that comes to an end, and other workers to run it."""
    programs, placement = draw(placed())
    order = draw(st.randoms(use_true_random=False))
    queues = [[Step(j, action) for action in program] for j, program in enumerate(programs)]
    present, done = set(chain.from_iterable(queues)), []
    while any(queues):
        able = [queue for queue in queues if queue and needs(queue[0], present) in (None, *done)]
        done.append(order.choice(able).pop(0))
    walk = tuple(tuple(step for step in done if placement[step.stage] == worker) for worker in range(4))
    return Schedule(programs, walk), draw(st.permutations(placement) | st.just([0] * len(placement)))


class TestWalk:
    @given(walked())
    def test_other_workers_keep_the_order_that_was_written(self, problem: tuple[Schedule, list[int]]) -> None:
        schedule, placement = problem
        walk = schedule.on(placement)
        assert Counter(executed(walk)) == Counter(steps_of(schedule))
        if schedule.walk is None:
            return
        for written in schedule.walk:
            for steps in walk:
                shared = [step for step in steps if step in written]
                assert shared == [step for step in written if step in steps]

    @given(walked())
    def test_each_worker_gets_the_steps_of_its_stages(self, problem: tuple[Schedule, list[int]]) -> None:
        schedule, placement = problem
        for worker, steps in enumerate(schedule.on(placement)):
            assert {placement[step.stage] for step in steps} <= {worker}
        for j, program in enumerate(schedule):
            steps = schedule.on(placement)[placement[j]]
            assert tuple(action for stage, action in steps if stage == j) == program

    @given(walked(), walked())
    def test_equal_schedules_do_the_same_on_any_workers(
        self, one: tuple[Schedule, list[int]], other: tuple[Schedule, list[int]]
    ) -> None:
        schedule, placement = one
        again = Schedule(tuple(schedule), schedule.walk)
        assert again == schedule
        assert hash(again) == hash(schedule)
        assert again.on(placement) == schedule.on(placement)
        assert (schedule == other[0]) == (str(schedule) == str(other[0]))
        assert (schedule != other[0]) == (str(schedule) != str(other[0]))

    def test_the_order_of_a_worker_s_steps_makes_a_difference(self) -> None:
        one = Schedule.parse("F0@0 F0@1 F1@0 F1@1 B0@1 B1@1 B0@0 B1@0")
        other = Schedule.parse("F0@0 F1@0 F0@1 F1@1 B0@1 B1@1 B0@0 B1@0")
        assert tuple(one) == tuple(other)
        assert one != other
        assert len({one, other, Schedule.parse(str(one))}) == 2
        assert tuple.__hash__(one) == hash(fill_like := Schedule(tuple(one)))
        assert fill_like == tuple(one)
        assert fill_like != one

    def test_a_line_for_each_stage_says_no_more_than_the_programs(self) -> None:
        schedule = fill_drain(3, 2)
        assert Schedule.parse(str(schedule)) == schedule == tuple(schedule)
        assert Schedule.parse("F0@1 B0@1\nF0@0 B0@0") == fill_drain(1, 2)

    @pytest.mark.parametrize(
        ("programs", "walk", "named"),
        [
            (fill_drain(1, 2), (tuple(steps_of(fill_drain(2, 2))),), "other steps of stage 0"),
            (fill_drain(1, 2), (tuple(steps_of(fill_drain(1, 1))),), "other steps of stage 1"),
            (fill_drain(1, 1), tuple((step,) for step in steps_of(fill_drain(1, 1))), "stage 0 are on 2 workers"),
        ],
    )
    def test_one_that_is_not_that_of_the_programs_is_refused(
        self, programs: Schedule, walk: tuple[tuple[Step, ...], ...], named: str
    ) -> None:
        with pytest.raises(ValueError, match=named):
            Schedule(programs, walk)

    @pytest.mark.parametrize("placement", [[0, 0], [0, 1]])
    def test_what_waits_for_ever_as_written_is_refused_anywhere(self, placement: list[int]) -> None:
        with pytest.raises(ValueError, match="for ever"):
            validate(Schedule.parse("F0@0 B0@0 F0@1 B0@1"), 1, placement)


class TestNames:
    @pytest.mark.parametrize("name", ["1F1B", "1f1b", "Fill_Drain", "ZERO_BUBBLE"])
    def test_capitals_do_not_matter(self, name: str) -> None:
        assert named(name, 3, [0, 1]) == named(name.lower(), 3, [0, 1])

    @pytest.mark.parametrize(
        ("name", "meant"), [("1f1b ", "1f1b"), ("fill-drain", "fill_drain"), ("zerobubble", "zero")]
    )
    def test_what_was_meant_is_said(self, name: str, meant: str) -> None:
        with pytest.raises(ValueError, match=rf"there is no schedule {name!r}; .*; did you mean '{meant}"):
            named(name, 3, [0, 1])


@st.composite
def orders(draw: st.DrawFn) -> tuple[Schedule, int, list[int]]:
    """A valid schedule in any order, its micro-batches, and the worker of each stage."""
    m, n = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    placement = draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
    return some_schedule(draw(CHOICES), m, placement, draw(st.integers(0, m))), m, placement


@st.composite
def edited(draw: st.DrawFn) -> tuple[Schedule, int, list[int]]:
    """A valid schedule after up to two edits of its lines, each of which may spoil it, or not."""
    schedule, m, placement = draw(orders())
    lines = [list(steps) for steps in schedule.on(placement)]
    for _ in range(draw(st.integers(0, 2))):
        line = draw(st.sampled_from([line for line in lines if line] or [[]]))
        if line:
            _edit(line, draw)
    programs = [[s.action for line in lines for s in line if s.stage == j] for j in range(len(placement))]
    return Schedule(programs, tuple(map(tuple, lines))), m, placement


def _edit(line: list[Step], draw: st.DrawFn) -> None:
    at, to = draw(st.integers(0, len(line) - 1)), draw(st.integers(0, len(line) - 1))
    stage, action = line[at]
    match draw(st.sampled_from(["move", "repeat", "leave out", "other kind", "other micro-batch"])):
        case "move":
            line.insert(to, line.pop(at))
        case "repeat":
            line.insert(to, line[at])
        case "leave out":
            del line[at]
        case "other kind":
            line[at] = Step(stage, Action(draw(st.sampled_from(list(Kind))), action.microbatch))
        case "other micro-batch":
            line[at] = Step(stage, Action(action.kind, draw(st.integers(0, 3))))


def trains(schedule: Schedule, m: int, placement: Sequence[int]) -> bool:
    """What :func:`validate` promises, said in another way: a word for each cell, and workers that get through."""
    for program in schedule:
        words = ["".join(Kind(kind).letter for kind, k in program if k == i) for i in range(m)]
        if not all(re.fullmatch("FR?(B|IW)", word) for word in words) or any(k >= m for _, k in program):
            return False
    return len(executed(schedule.walk or lines_of(schedule))) == len(steps_of(schedule))


def lines_of(schedule: Schedule) -> list[list[Step]]:
    return [[Step(j, action) for action in program] for j, program in enumerate(schedule)]


class TestValidate:
    @given(orders())
    def test_any_order_that_trains_is_valid(self, problem: tuple[Schedule, int, list[int]]) -> None:
        schedule, m, placement = problem
        assert trains(schedule, m, placement)
        validate(schedule, m, placement)

    @given(edited())
    def test_it_is_refused_exactly_if_it_does_not_train(self, problem: tuple[Schedule, int, list[int]]) -> None:
        schedule, m, placement = problem
        if trains(schedule, m, placement):
            validate(schedule, m, placement)
        else:
            with pytest.raises(ValueError, match=r"[FRBIW]\d@\d"):
                validate(schedule, m, placement)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("F0 F0 B0", "F0@0 occurs twice"),
            ("F0 R0 R0 B0", "R0@0 occurs twice"),
            ("F0 B0 B0", "B0@0 occurs twice"),
            ("F0 I0 W0 W0", "W0@0 occurs twice"),
            ("R0 F0 B0", "R0@0 comes before F0@0"),
            ("B0 F0", "B0@0 comes before F0@0"),
            ("F0 W0 I0", "W0@0 comes before I0@0"),
            ("F0 B0 R0", "R0@0 comes after the backward"),
            ("F0 I0 R0 W0", "R0@0 comes after the backward"),
            ("F0 I0 W0 R0", "R0@0 comes after the backward"),
            ("F0 I0 W0 B0", "B0@0 comes after I0@0"),
            ("F0 I0 B0 W0", "B0@0 comes after I0@0"),
            ("F0 B0 I0 W0", "I0@0 comes after B0@0"),
            ("F0 I0", "W0@0 is missing"),
            ("F0", "B0@0 is missing"),
            ("F0 B0 F1 B1", "F1@0 is of micro-batch 1, but there are 1"),
        ],
    )
    def test_what_is_wrong_is_named(self, text: str, told: str) -> None:
        with pytest.raises(ValueError, match=told):
            validate(Schedule.parse(text), 1, [0])

    def test_a_missing_forward_is_named(self) -> None:
        with pytest.raises(ValueError, match="F1@0 is missing"):
            validate(Schedule.parse("F0 B0"), 2, [0])

    def test_workers_that_stages_share_may_wait_for_ever_where_others_would_not(self) -> None:
        alone, shared = "F0@0 B0@0\nF0@1 B0@1", "F0@1 F0@0 B0@1 B0@0"
        validate(Schedule.parse(alone), 1, [0, 1])
        with pytest.raises(ValueError, match="for ever: F0@1 for F0@0"):
            validate(Schedule.parse(shared), 1, [0, 0])

    def test_other_numbers_of_stages_are_named(self) -> None:
        with pytest.raises(ValueError, match="for 2 stages, the pipe has 1"):
            validate(fill_drain(1, 2), 1, [0])


class TestRecomputing:
    @given(orders(), st.integers(0, 4), st.integers(0, 4))
    def test_once_is_as_good_as_twice(self, problem: tuple[Schedule, int, list[int]], one: int, two: int) -> None:
        schedule, _, _ = problem
        assert schedule.recomputing(one).recomputing(two) == schedule.recomputing(max(one, two))

    @given(orders(), st.integers(0, 4))
    def test_all_else_stays_in_its_place(self, problem: tuple[Schedule, int, list[int]], stop: int) -> None:
        schedule, m, placement = problem
        again = schedule.recomputing(stop)
        validate(again, m, placement)
        added = set(steps_of(again)) - set(steps_of(schedule))
        for before, after in zip(schedule.on(placement), again.on(placement), strict=True):
            assert tuple(step for step in after if step not in added) == before or schedule.walk is None
        for program, longer in zip(schedule, again, strict=True):
            assert tuple(action for action in longer if action in program) == program
            assert {i for kind, i in longer if kind == Kind.RECOMPUTE} >= set(range(min(stop, m)))
            for action, following in pairwise(longer):
                assert action in program or following.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
                assert action in program or following.microbatch == action.microbatch < stop


class TestInterleaved:
    @given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.data())
    def test_a_worker_holds_no_more_than_is_promised(self, m: int, k: int, v: int, data: st.DataObject) -> None:
        schedule = interleaved(m, k * v, k, data.draw(st.integers(0, m)))
        for r, steps in enumerate(schedule.on([j % k for j in range(k * v)])):
            changes = [{Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(step.action.kind, 0) for step in steps]
            promised = 2 * (k - r - 1) + (v - 1) * k + 1
            assert max(accumulate(changes)) <= promised
            if m % k == 0:
                assert max(accumulate(changes)) == min(m * v, promised)


class TestParse:
    @pytest.mark.parametrize(("text", "line"), [("F0 X1", 1), ("# first\n\nF0 B0\n  # then\nF0 X1", 5)])
    def test_what_cannot_be_read_is_named_with_its_line_in_the_text(self, text: str, line: int) -> None:
        with pytest.raises(ValueError, match=f"cannot read 'X1' in line {line} of the schedule"):
            Schedule.parse(text)

    @given(orders(), st.randoms(use_true_random=False))
    def test_blank_lines_comments_and_dots_say_nothing(
        self, problem: tuple[Schedule, int, list[int]], random: Random
    ) -> None:
        schedule, _, _ = problem
        noise = ["", "   ", "# F9 B9", "  # nothing", "#"]
        lines: list[str] = random.choices(noise, k=2)
        for line in str(schedule).splitlines():
            words = [word for each in line.split() for word in (["."] * random.randrange(3) + [each])]
            lines += ["  " * random.randrange(2) + "  ".join(words) + random.choice(["", "  # R0", "#"])]
            lines += random.choices(noise, k=random.randrange(3))
        assert Schedule.parse("\n".join(lines)) == schedule
