"""The program of one worker is that of the whole schedule, and no other program is made for it."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import SCHEDULES, SPLITTING, Step, named, program_of
from gpipe.schedule import _lanes as lanes
from gpipe.schedule import _named as names_of
from gpipe.schedule import _program as program

from ..schedules import LOOPED, V_SHAPED, names


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, int, list[int], dict[str, Any]]:
    """A name, micro-batches, the worker of each stage, and options of a schedule."""
    (name, placement), m = draw(names()), draw(st.integers(0, 9))
    if name not in (*LOOPED, *V_SHAPED):
        placement = draw(st.permutations(placement * draw(st.integers(1, 3))))
    n = len(placement)
    stops = st.integers(0, m) | st.lists(st.integers(0, m), min_size=n, max_size=n)
    split = st.none() | st.lists(st.integers(0, n - 1), unique=True)
    return name, m, placement, {"checkpoint_stop": draw(stops), "split": draw(split)}


@given(questions())
def test_it_is_that_of_the_whole_schedule(question: tuple[str, int, list[int], dict[str, Any]]):
    name, m, placement, options = question
    whole = named(name, m, placement, **options).on(placement)
    for worker in set(placement):
        found = program_of(name, m, len(placement), worker, placement=placement, **options)
        assert found == tuple(whole[worker])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("n", [4, 4000])
def test_no_other_steps_are_made(name: str, n: int, monkeypatch: pytest.MonkeyPatch):
    made = count()

    def counted(*fields: Any) -> Step:
        next(made)
        return Step(*fields)

    for module in (lanes, program):
        monkeypatch.setattr(module, "Step", counted)
    monkeypatch.setattr(names_of, "named", None)
    own = 2 if name in V_SHAPED else 1
    found = program_of(name, 6, n, n // 2 - 1, checkpoint_stop=2)
    backwards = sum(step.action.kind in ("backward", "backward_input") for step in found)
    weights = sum(step.action.kind == "backward_weight" for step in found)
    assert backwards == 6 * own
    assert not weights or name in SPLITTING
    assert len(found) == next(made) == (2 * 6 + 2) * own + weights


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("1f2b", 2, 2, 0), "there is no schedule '1f2b'.*did you mean '1f1b'"),
        (("1f1b", 2, 2, 2), "worker: expected one of the placement, from 0 to 1, got 2"),
        (("interleaved", 2, 2, -1), "worker: expected one of the placement, from 0 to 1, got -1"),
    ],
)
def test_what_is_not_there(given: tuple[str, int, int, int], message: str):
    with pytest.raises(ValueError, match=message):
        program_of(*given)
