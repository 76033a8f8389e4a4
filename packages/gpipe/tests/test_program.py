"""The program of one worker is that of the whole schedule, and no other program is made for it."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import SCHEDULES, Step, named, program_of
from gpipe.schedule import _builders as builders
from gpipe.schedule import _program as program

pytestmark = pytest.mark.timeout(60)


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, int, list[int], dict[str, Any]]:
    """A name, micro-batches, the worker of each stage, and options of a schedule."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    m, workers = draw(st.integers(0, 9)), draw(st.integers(1, 5))
    placement = list(range(workers)) * draw(st.integers(1, 3))
    if name != "interleaved":
        placement = draw(st.permutations(placement))
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


@given(questions())
def test_by_default_each_stage_has_a_worker(question: tuple[str, int, list[int], dict[str, Any]]):
    name, m, placement, options = question
    n = len(placement)
    whole = named(name, m, range(n), **options).on(range(n))
    assert [program_of(name, m, n, worker, **options) for worker in range(n)] == [tuple(own) for own in whole]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("n", [4, 4000])
def test_no_other_steps_are_made(name: str, n: int, monkeypatch: pytest.MonkeyPatch):
    made = count()

    def counted(*fields: Any) -> Step:
        next(made)
        return Step(*fields)

    for module in (builders, program):
        monkeypatch.setattr(module, "Step", counted)
    monkeypatch.setattr(program, "named", None)
    found = program_of(name, 6, n, n - 2, checkpoint_stop=2)
    assert len(found) == next(made) == 6 * (3 if name == "zero_bubble" else 2) + 2


def test_stages_in_turns_are_made_alone_too(monkeypatch: pytest.MonkeyPatch):
    placement = list(range(4)) * 3
    whole = named("interleaved", 8, placement).on(placement)
    monkeypatch.setattr(program, "named", None)
    assert program_of("interleaved", 8, 12, 2, placement=placement) == whole[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("1f2b", 2, 2, 0), "there is no schedule '1f2b'.*did you mean '1f1b'"),
        (("1f1b", 2, 2, 2), "worker: expected one from 0 to 1, got 2"),
        (("interleaved", 2, 2, -1), "worker: expected one from 0 to 1, got -1"),
    ],
)
def test_what_is_not_there(given: tuple[str, int, int, int], message: str):
    with pytest.raises(ValueError, match=message):
        program_of(*given)


def test_placements_that_do_not_fit():
    with pytest.raises(ValueError, match="placement: expected a worker for each of 3 stages, got 2"):
        program_of("1f1b", 2, 3, 0, placement=[0, 1])
    with pytest.raises(ValueError, match=r"worker: expected one of the placement \[0, 0\], got 1"):
        program_of("1f1b", 2, 2, 1, placement=[0, 0])
    with pytest.raises(ValueError, match="interleaving takes the workers in turn"):
        program_of("interleaved", 2, 3, 0, placement=[0, 1, 1])
    with pytest.raises(ValueError, match="3 stages do not go evenly on 2 workers"):
        program_of("interleaved", 2, 3, 0, placement=[0, 1, 0])
    with pytest.raises(ValueError, match="checkpoint_stop: expected a number, or one for each of 2 stages, got 1"):
        program_of("1f1b", 2, 2, 0, checkpoint_stop=[1])
