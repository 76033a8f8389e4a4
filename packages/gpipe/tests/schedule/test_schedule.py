"""Schedules as data: steps of workers, recomputations that are written down, and text."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import (
    LOSS_OF_ALL,
    SCHEDULES,
    Action,
    Kind,
    Program,
    Schedule,
    Step,
    fill_drain,
    looped_bfs,
    named,
    replay,
    validate,
)

from ..schedules import Scheduled, executed, fitting, needs, orders, placed, steps_of


@st.composite
def walked(draw: st.DrawFn) -> tuple[Schedule, list[int]]:
    """Draw a schedule in any valid order, and a different placement to run it on."""
    schedule, _, placement = draw(orders())
    return schedule, draw(st.permutations(placement) | st.just([0] * len(placement)))


@given(walked())
def test_each_worker_gets_the_steps_of_its_stages(problem: tuple[Schedule, list[int]]) -> None:
    schedule, placement = problem
    for worker, steps in enumerate(schedule.on(placement)):
        assert {placement[step.stage] for step in steps} <= {worker}
    for j, program in enumerate(schedule):
        steps = schedule.on(placement)[placement[j]]
        assert tuple(action for stage, action in steps if stage == j) == program
    assert Counter(executed(schedule.on(placement))) == Counter(steps_of(schedule))


@given(placed())
def test_nobody_idles_who_could_work(problem: tuple[tuple[Program, ...], list[int]]) -> None:
    """Programs have no explicit order, and each action takes one tick."""
    programs, placement = problem
    spans = replay(Schedule(programs).on(placement))
    busy = {(placement[step.stage], span.start) for step, span in spans.items()}
    for j, program in enumerate(programs):
        ready = 0.0
        for step in (Step(j, action) for action in program):
            source = needs(step, set(spans))
            ready = max(ready, spans[source].end if source else 0.0)
            assert all((placement[j], tick) in busy for tick in range(int(ready), int(spans[step].start)))
            ready = spans[step].end


@given(walked(), walked())
def test_equal_schedules_do_the_same_on_any_workers(
    one: tuple[Schedule, list[int]], other: tuple[Schedule, list[int]]
) -> None:
    schedule, placement = one
    again = Schedule(tuple(schedule), schedule.worker_steps)
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert again.on(placement) == schedule.on(placement)
    assert (schedule == other[0]) == (str(schedule) == str(other[0]))
    assert (schedule != other[0]) == (str(schedule) != str(other[0]))


@pytest.mark.parametrize(
    ("programs", "worker_steps", "named"),
    [
        (fill_drain(1, 2), (tuple(steps_of(fill_drain(2, 2))),), "different steps of stage 0"),
        (fill_drain(1, 2), (tuple(steps_of(fill_drain(1, 1))),), "different steps of stage 1"),
        (fill_drain(1, 1), tuple((step,) for step in steps_of(fill_drain(1, 1))), "stage 0 are on 2 workers"),
    ],
)
def test_worker_steps_must_match_programs(
    programs: Schedule, worker_steps: tuple[tuple[Step, ...], ...], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Schedule(programs, worker_steps)


@given(orders(), st.integers(0, 4))
def test_recomputing_leaves_all_else_in_its_place(problem: Scheduled, stop: int) -> None:
    schedule, m, placement = problem
    again = schedule.recomputing(stop)
    validate(again, m, placement)
    added = set(steps_of(again)) - set(steps_of(schedule))
    for before, after in zip(schedule.on(placement), again.on(placement), strict=True):
        assert tuple(step for step in after if step not in added) == before or schedule.worker_steps is None
    for program, longer in zip(schedule, again, strict=True):
        assert tuple(action for action in longer if action in program) == program
        assert {i for kind, i in longer if kind == Kind.RECOMPUTE} >= set(range(min(stop, m)))
        for action, following in pairwise(longer):
            assert action in program or following.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            assert action in program or following.microbatch == action.microbatch < stop


@pytest.mark.parametrize(("text", "line"), [("F0 X1", 1), ("# first\n\nF0 B0\n  # then\nF0 X1", 5)])
def test_parse_error_names_the_line(text: str, line: int) -> None:
    with pytest.raises(ValueError, match=f"cannot read 'X1' in line {line} of the schedule"):
        Schedule.parse(text)


@given(orders(), st.randoms(use_true_random=False))
def test_blank_lines_comments_and_dots_say_nothing(problem: Scheduled, random: Random) -> None:
    schedule, _, _ = problem
    noise = ["", "   ", "# F9 B9", "  # nothing", "#"]
    lines: list[str] = random.choices(noise, k=2)
    for line in str(schedule).splitlines():
        words = [word for each in line.split() for word in (["."] * random.randrange(3) + [each])]
        lines += ["  " * random.randrange(2) + "  ".join(words) + random.choice(["", "  # R0", "#"])]
        lines += random.choices(noise, k=random.randrange(3))
    assert Schedule.parse("\n".join(lines)) == schedule


@given(orders())
def test_full_batch_loss_separates_forwards_and_backwards(problem: Scheduled) -> None:
    """It directly follows the last forward of the last stage, or the schedule raises. Everything else is unchanged."""
    schedule, m, placement = problem
    kinds = [kind for kind, _ in schedule[-1]]
    waits = "backward" not in " ".join(kinds[: len(kinds) - kinds[::-1].index(Kind.FORWARD)])
    if not waits:
        with pytest.raises(ValueError, match=r"the last stage does [BI]\d before its last forward, F\d"):
            schedule.with_loss()
        return
    found, last = schedule.with_loss(), len(schedule) - 1
    validate(found, m, placement)
    assert found.has_loss
    assert not schedule.has_loss
    assert found.with_loss() is found
    assert Schedule.parse(str(found)) == found
    assert [[action for action in program if action != LOSS_OF_ALL] for program in found] == [*map(list, schedule)]
    place = found[-1].index(LOSS_OF_ALL)
    assert {kind for kind, _ in found[-1][place:]}.isdisjoint([Kind.FORWARD])
    assert found[-1][place - 1].kind == Kind.FORWARD
    for steps in (schedule.on(placement), found.on(placement)):
        assert Counter(executed(steps)) == Counter(step for own in steps for step in own)
    spans = replay(found.on(placement), [{**dict.fromkeys(Kind, 1.0), Kind.LOSS: 7.0}] * len(schedule))
    loss = spans[Step(last, LOSS_OF_ALL)]
    assert loss.end - loss.start == 7
    for (stage, (kind, _)), span in spans.items():
        if stage == last and kind == Kind.FORWARD:
            assert span.end <= loss.start
        if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            assert span.start >= loss.end


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_schedules_that_support_full_batch_loss(name: str, workers: int, loops: int, m: int) -> None:
    schedule = named(name, m, fitting(name, workers, loops))
    if m == 1 or name in ("fill_drain", "looped_bfs"):
        assert str(schedule.with_loss()).count("C") == 1
        return
    with pytest.raises(ValueError, match="before its last forward"):
        schedule.with_loss()


def test_text_of_schedule_with_loss() -> None:
    assert str(fill_drain(2, 2).with_loss()) == "F0 F1 B1 B0\nF0 F1 C B1 B0"
    looped = looped_bfs(1, 4, 2).with_loss()
    assert str(looped) == "F0@0 F0@2 B0@2 B0@0\nF0@1 F0@3 C@3 B0@3 B0@1"
    assert Schedule.parse("F0 C B0") == Schedule([[Action("forward", 0), LOSS_OF_ALL, Action("backward", 0)]])
    assert not Schedule([]).with_loss().has_loss
    for wrong in ("F0 C0 B0", "F0 C1@0 B0", "F0 c B0"):
        with pytest.raises(ValueError, match="or C for the loss of the full mini-batch"):
            Schedule.parse(wrong)
