"""The search against trying everything, on made-up costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpipe._plan import _search
from gpipe._plan._arguments import read_chunks
from gpipe._plan._candidate import replayed, stops_of
from gpipe._plan._costs import Measured
from gpipe._plan._infeasible import explain
from gpipe._plan._memory import held_by
from gpipe._plan._neighbours import neighbours
from gpipe._plan._search import NEAR, candidates, search
from gpipe.schedule import in_flight, named
from gpipe.simulate import simulate

from .plans import SCHEDULES, everything, fits, measured_of, measurements, space_of

pytestmark = pytest.mark.timeout(120)
EQUAL = measured_of([(1e-3, 400, 10, 10)] * 24, 2)
UNEVEN = measured_of([(seconds, 10, 10, 10) for seconds in (1e-3, 2e-3, 2e-3, 5e-3, 5e-3)], 2)

few = settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@few
@given(measurements())
def test_nothing_is_much_faster(measured: Measured):
    """Than the fastest that was found; of those near it the plan is the simplest. The closed form chose the balance."""
    space = space_of(measured)
    found = search(space)
    fastest = min(each.seconds for each in found)
    assert fastest <= min(each.seconds for each in everything(space)) * 1.12
    assert found[0].seconds <= fastest * (1 + NEAR)
    near = [each for each in found if each.seconds <= fastest * (1 + NEAR)]
    assert found[0].chunks == min(each.chunks for each in near)


@few
@given(measurements(), st.floats(0.2, 1.2))
def test_what_is_found_fits_and_something_is_if_there_is_room(measured: Measured, share: float):
    free = min(everything(space_of(measured)), key=lambda each: each.fullest)
    space = space_of(measured, max(1, round(share * search(space_of(measured))[0].fullest)))
    found = search(space)
    assert all(fits(space, each) for each in found)
    assert found or free.fullest > space.memory[0] / 1.1  # a tenth may be lost to peaks that are no sums


@settings(few, max_examples=25)
@given(measurements(), st.floats(0.2, 1.2))
@example(EQUAL, 0.5)
def test_pieces_fit_and_make_no_plan_slower(measured: Measured, share: float):
    memory = max(1, round(share * search(space_of(measured))[0].fullest))
    whole, found = search(space_of(measured, memory)), search(space := space_of(measured, memory, pieces=True))
    assert all(fits(space, each) for each in found)
    assert not whole or found[0].seconds <= whole[0].seconds


@settings(few, max_examples=25)
@given(measurements(), st.floats(0.2, 1.2), st.booleans())
@example(UNEVEN, 1.2, False)
def test_balances_nearby_make_no_plan_slower_and_none_is_faster_than_the_fastest(
    measured: Measured, share: float, pieces: bool
):
    space = space_of(measured, max(1, round(share * search(space_of(measured))[0].fullest)), pieces=pieces)
    with patch.object(_search, "improved", lambda _, each: each):
        before = search(space)
    found = search(space)
    assert bool(found) == bool(before)
    assert all(fits(space, each) for each in found)
    if found:
        assert found[0].seconds <= before[0].seconds
        fastest = min(found, key=lambda each: each.seconds)
        assert all(each.seconds >= fastest.seconds for each in neighbours(space, fastest))


def test_with_two_micro_batches_the_first_stage_has_more_to_do():
    """Which the closed form cannot tell: it is the same for either stage."""
    space = replace(space_of(UNEVEN), chunks=(2,), schedules=("1f1b",))
    with patch.object(_search, "improved", lambda _, each: each):
        before = search(space)[0]
    best = search(space)[0]
    assert best.seconds < 0.97 * before.seconds
    assert best.sizes[0] > before.sizes[0]


def test_pieces_of_equal_layers_are_quicker_than_whole_stages():
    """Where what is short is a little, little is computed again."""
    free = replace(space_of(EQUAL), chunks=(8,), schedules=("1f1b",))
    fastest = search(free)[0]
    for share in (0.9, 0.8, 0.7, 0.6):
        space = replace(free, memory=(round(share * fastest.fullest),) * 2, pieces=True)
        pieces, whole = search(space)[0], search(replace(space, pieces=False))[0]
        assert pieces.in_pieces
        assert fastest.seconds < pieces.seconds < 0.97 * whole.seconds
    (few,) = search(replace(free, memory=(round(0.95 * fastest.fullest), None), pieces=True))[:1]
    assert [sum(way) for way in few.modes if not isinstance(way, str)] == [1]


@few
@given(measurements(most_layers=4, most_stages=2), st.floats(0.3, 0.9))
def test_no_flags_are_much_faster(measured: Measured, share: float):
    """Than the fastest that was found, of all balances and flags."""
    measured = replace(measured, copied=(False,) * measured.stages, links=measured.links[:1] * measured.stages)
    memory = max(1, round(share * search(space_of(measured))[0].fullest))
    space = replace(space_of(measured, memory, pieces=True), chunks=(4,), schedules=("1f1b", "fill_drain"))
    possible = [each for each in everything(space) if fits(space, each)]
    found = search(space)
    assert found or not possible
    assert not found or min(each.seconds for each in found) <= 1.12 * min(each.seconds for each in possible)


@few
@given(measurements())
def test_a_plan_is_replayed_as_it_would_be_simulated(measured: Measured):
    for found in search(space_of(measured)):
        stages, hops = found.costs.stage_costs(found.sizes, found.modes), found.costs.hops(found.sizes)
        schedule = named(
            found.schedule, found.chunks, range(len(stages)), stops_of(found.modes, found.chunks), found.split
        )
        simulated = simulate(schedule, stages, transfer=hops[1:]).makespan
        assert replayed(found) == pytest.approx(simulated + measured.step)


@given(measurements(), st.sampled_from(SCHEDULES))
def test_a_schedule_alone_is_found_also_where_nothing_can_be_split(measured: Measured, schedule: str):
    whole = [
        replace(one, layers=tuple(replace(layer, backward_input_seconds=None) for layer in one))
        for one in (measured.profiles[0], *measured.profiles[0].others)
    ]
    profile = replace(whole[0], others=tuple(whole[1:]))
    space = space_of(replace(measured, profiles=(profile,) * measured.stages))
    found = search(replace(space, schedules=(schedule,)))
    assert found
    assert {(each.schedule, each.split) for each in found} == {(schedule, ())}


@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(1, 5), st.data())
def test_micro_batches_held_are_those_in_flight(schedule: str, m: int, n: int, data: st.DataObject):
    split = data.draw(st.lists(st.integers(0, n - 1), unique=True)) if schedule == "zero_bubble" else ()
    programs = named(schedule, m, range(n), 0, split)
    assert held_by(schedule, m, n, split) == [in_flight(program) for program in programs]


@given(st.integers(1, 5000))
def test_numbers_of_micro_batches_reach_from_all_rows_to_one(rows: int):
    """The next is never much more than twice as many, and the micro-batches have nearly the same rows."""
    found = read_chunks(None, rows)
    assert found[0] == 1
    assert found[-1] == rows
    assert all(b <= 2 * a + 1 for a, b in pairwise(found))
    assert all(-(-rows // -(-rows // m)) == m for m in found)


@few
@given(measurements(), st.floats(0.1, 0.9))
def test_an_error_names_who_is_short_and_what_would_fit(measured: Measured, share: float):
    least = min(each.fullest for each in everything(space_of(measured)))
    space = space_of(measured, max(1, round(share * least)))
    if next(candidates(space), None) is not None:
        return
    error = explain(space, ["cpu"] * measured.stages, [])
    assert error.short > 0
    enough = int(error.changes[-1].partition("=")[2].split()[0])
    assert next(candidates(space_of(measured, enough)), None) is not None
    assert f"device {error.device} (cpu)" in str(error)
