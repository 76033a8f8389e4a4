"""Valid schedules are accepted, and invalid ones raise an error that names the problem."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import Action, Kind, Schedule, Step, in_flight, validate
from gpipe.schedule._actions import MOVES

from ..schedules import Scheduled, executed, held, orders, steps_of


@st.composite
def edited(draw: st.DrawFn) -> Scheduled:
    """Draw a valid schedule with up to two random edits, which may invalidate it."""
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
    """Check the contract of :func:`validate` differently: a word per cell, and workers that finish."""
    for program in schedule:
        computed = [action for action in program if action.kind not in MOVES]
        words = ["".join(Kind(kind).letter for kind, k in computed if k == i) for i in range(m)]
        if not all(re.fullmatch("FR?(B|IW)", re.sub("[OP]", "", word)) for word in words):
            return False
        if not all(re.fullmatch("F(OP)*(B|I(OP)*W)", word.replace("R", "")) for word in words):
            return False
        if any(k >= m for _, k in computed):
            return False
    return len(executed(schedule.worker_steps or lines_of(schedule))) == len(steps_of(schedule))


def lines_of(schedule: Schedule) -> list[list[Step]]:
    return [[Step(j, action) for action in program] for j, program in enumerate(schedule)]


@given(edited())
def test_validate_rejects_exactly_invalid_schedules(problem: Scheduled) -> None:
    schedule, m, placement = problem
    if trains(schedule, m, placement):
        validate(schedule, m, placement)
    else:
        with pytest.raises(ValueError, match=r"[FRBIWOP]\d@\d|stage \d does .* for micro-batch \d; expected"):
            validate(schedule, m, placement)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("F0 R0 R0 B0", "stage 0 does F0 R0 R0 B0 for micro-batch 0; expected F0, perhaps R0, and then B0, or I0"),
        ("F0 I0", "stage 0 does F0 I0 for micro-batch 0"),
        ("# nothing", "the schedule is for 0 stages, but the pipe has 1"),
        ("F0 B0 F1 B1", "F1@0 is for micro-batch 1, but there are 1"),
    ],
)
def test_what_is_wrong_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        validate(Schedule.parse(text), 1, [0])


@given(orders())
def test_stage_holds_values_for_later_actions(problem: Scheduled):
    """Whichever of its backwards are split."""
    schedule, _, _ = problem
    assert [in_flight(program) for program in schedule] == held(lines_of(schedule))


@pytest.mark.parametrize(
    "text",
    [
        "F0 F1 C B1 B0\nF0 F1 B1 B0",
        "F0 F1 B1 B0\nF0 C F1 B1 B0",
        "F0 F1 B1 B0\nF0 F1 B1 C B0",
        "F0 F1 B1 B0\nF0 F1 C C B1 B0",
        "F0 F1 B1 B0\nC F0 F1 B1 B0",
        "F0 F1 B0 B1\nF0 B0 F1 C B1",
    ],
)
def test_the_loss_of_all_rows_has_one_place(text: str) -> None:
    with pytest.raises(ValueError, match="loss of the full mini-batch"):
        validate(Schedule.parse(text), 2, (0, 1))
