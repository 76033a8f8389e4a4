"""The search, compared with trying every candidate, on made-up costs."""

from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpipe._plan._arguments import MODES, SCHEDULES, list_placements, read_chunks
from gpipe._plan._bytes import in_flight_peaks
from gpipe._plan._candidate import SearchSpace
from gpipe._plan._costs import Measured
from gpipe._plan._infeasible import explain, relaxations
from gpipe._plan._links import Links, along, links
from gpipe._plan._orders import MOST, orders
from gpipe._plan._search import NEAR, search
from gpipe.schedule import SPLITTING, checkpoint_stops, in_flight, named
from gpipe.simulate import Link, simulate
from profiler import Profile

from ..plans import everything, few, looped, measured_of, measurements, space_of

EQUAL = measured_of([(1e-3, 400, 10, 10)] * 24, 2)
UNEVEN = measured_of([(seconds, 10, 10, 10) for seconds in (1e-3, 2e-3, 2e-3, 5e-3, 5e-3)], 2)
SIX = measured_of([(0.05, 10, 10, 10)] * 6, 2)
FALLING = measured_of([(seconds, 10, 10, 10) for seconds in (2e-3, 2e-3, 2e-3, 1e-3, 1e-3)], 3)

problems = measurements(most_layers=5)


@st.composite
def all_links(draw: st.DrawFn, devices: int) -> Links:
    each = st.sampled_from([Link(), Link(1e-3, 1e6), Link(1e-3, 1e4)])
    pairs = {pair: draw(each) for pair in combinations(range(devices), 2)}
    return links(devices, lambda i, j: pairs[min(i, j), max(i, j)])


rooms = st.sampled_from([0.99, 1.01, 1.1, 1.5, None])
"""Memory limits, relative to the least memory with which anything fits."""


@settings(few, max_examples=15)
@given(problems, rooms, st.booleans())
@example(UNEVEN, 1.1, False)
@example(FALLING, None, False)
@example(SIX, None, True)
def test_search_finds_the_fastest_that_fits(measured: Measured, room: float | None, loops: bool):
    space = space_of(measured)
    every = list(everything(space))
    memory = (None if room is None else int(room * min(each.fullest for each in every)),) * measured.devices
    space = replace(space, memory=memory)
    spaces = [*(looped(space) if loops else ()), space]
    possible = [each for each in every if each.fits(memory)]
    found = search(spaces)
    assert found[0].fits(memory) >= bool(possible)
    assert loops or found[0].fits(memory) == bool(possible)
    assert len(found) == 1 or all(each.fits(memory) for each in found)
    if possible:
        # The search covers several stages per device only if each fits into an equal part of its memory.
        others = spaces[:-1] if room is None else []
        possible += [each for some in others for each in everything(replace(some, modes=("never",)))]
        fastest = min(each.seconds for each in possible)
        assert found[0].seconds <= fastest * 1.02
        near = [each for each in found if each.seconds <= min(one.seconds for one in found) * (1 + NEAR)]
        assert (len(found[0].sizes), found[0].chunks) == min((len(each.sizes), each.chunks) for each in near)


@settings(few, max_examples=15)
@given(measurements(most_layers=4), st.data())
def test_search_finds_the_fastest_order_of_devices(measured: Measured, data: st.DataObject):
    """Devices differ in memory, speed and links. The result fits if any order does, and none is over 2 % faster."""
    each = st.tuples(st.sampled_from([0.6, 1.0, 1.5, None]), st.sampled_from([0.5, 1.0, 2.0]))
    given = data.draw(st.lists(each, min_size=measured.devices, max_size=measured.devices), label="memory and speeds")
    size = min(candidate.fullest for candidate in everything(space_of(measured)))
    memory = [None if share is None else int(share * size) for share, _ in given]
    speeds, between = [speed for _, speed in given], data.draw(all_links(measured.devices), label="links")

    def in_order(order: tuple[int, ...]) -> SearchSpace:
        there = replace(
            measured,
            speeds=tuple(speeds[k] for k in order),
            order=order,
            links=along(between, order),
            separate_memory=True,
        )
        return replace(space_of(there), memory=there.reorder(memory))

    spaces = [in_order(order) for order in orders([*zip(memory, speeds, strict=True)], between)]
    all_spaces = [in_order(order) for order in permutations(range(measured.devices))]
    every = [candidate for space in all_spaces for candidate in everything(space) if candidate.fits(space.memory)]
    found = search(spaces)
    assert all(candidate.fits(candidate.costs.measured.reorder(memory)) for candidate in found) == bool(every)
    if every:
        assert found[0].seconds <= 1.02 * min(candidate.seconds for candidate in every)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1.0, 2.0])), min_size=1, max_size=9), st.data())
def test_orders_are_distinct_and_limited_in_number(devices: list[tuple[int, float]], data: st.DataObject):
    alike = links(len(devices), lambda i, j: Link())
    found = orders(devices, alike)
    differ = orders(devices, data.draw(all_links(len(devices))))
    assert differ[0] == found[0]
    assert len({*differ}) == len(differ) <= MOST
    assert all(sorted(order) == [*range(len(devices))] for order in differ)
    named = [tuple(devices[k] for k in order) for order in found]
    assert named[0] == tuple(devices)
    assert len({*named}) == len(named) <= MOST
    assert all(sorted(order) == [*range(len(devices))] for order in found)
    if len(named) < MOST and len(devices) < 4:
        assert {*named} == {*permutations(devices)}


def test_only_stages_that_do_not_fit_are_recomputed():
    """If memory is slightly short, only a part of the work is recomputed."""
    free = replace(space_of(EQUAL), chunks=(8,), schedules=("1f1b",))
    fastest = search([free])[0]
    space = replace(free, memory=(round(0.8 * fastest.fullest),) * 2)
    some, every = search([space])[0], search([replace(space, modes=("always",))])[0]
    assert {*some.modes} > {"never"}
    assert fastest.seconds < some.seconds < every.seconds


@few
@given(measurements())
def test_predicted_time_equals_the_simulation(measured: Measured):
    for found in search([space_of(measured)]):
        stages, hops = found.costs.stage_costs(found.sizes, found.modes), found.costs.hops(found.sizes)
        assert (
            found.seconds == simulate(found.program(found.chunks), stages, transfer=hops[1:]).makespan + measured.step
        )


@given(st.integers(1, 5000))
def test_searched_chunks_reach_from_one_to_rows(rows: int):
    """Each number is at most about twice the previous one, and is the number of micro-batches that results."""
    found = read_chunks(None, rows)
    assert found[0] == 1
    assert found[-1] == rows
    assert all(b <= 2 * a + 1 for a, b in pairwise(found))
    assert all(-(-rows // -(-rows // m)) == m for m in found)
    # The last micro-batch has the fewest rows, and batch norm needs two.
    assert all(rows - (m - 1) * -(-rows // m) >= 2 for m in read_chunks(None, rows, least=2)[1:])


@few
@given(measurements(), st.floats(0.1, 0.98))
def test_infeasible_names_the_device_and_fitting_changes(measured: Measured, share: float):
    least = min(each.fullest for each in everything(space_of(measured)))
    space = space_of(measured, max(1, int(share * least)))
    (best,) = search([space])
    assert not best.fits(space.memory)
    error = explain(space, best, ["cpu"] * measured.stages)
    assert error.short > 0
    assert f"device {error.device} (cpu)" in str(error)
    enough = int(error.changes[-1].partition("=")[2].split()[0])
    assert enough <= 1.02 * least + 1
    assert search([space_of(measured, enough)])[0].fits([enough] * measured.devices)
    for text in error.changes[:-1]:
        changed = relaxations(space)[text]
        assert "devices" not in text or text.startswith(f"{changed.measured.stages} ")
        assert search([changed])[0].fits(changed.memory)


@few
@given(measurements(most_layers=5), st.floats(0.5, 1.5))
@example(SIX, 1.4)
def test_unfitting_looped_stages_are_short_of_memory(measured: Measured, share: float):
    least = min(each.fullest for each in everything(space_of(measured)))
    for space in looped(space_of(measured, int(share * least))):
        found = search([space])
        assert all(each.fits(space.memory) for each in found[1:])
        assert found[0].fits(space.memory) or explain(space, found[0], ["cpu"] * measured.devices).short > 0


@given(st.sampled_from(SCHEDULES), st.sampled_from(MODES), st.integers(1, 40), st.integers(2, 4), st.data())
def test_in_flight_peaks_match_the_order_of_actions(
    schedule: str, mode: str, m: int, devices: int, data: st.DataObject
):
    (placement,) = list_placements([schedule], devices, 2 * devices)
    j, splits = data.draw(st.integers(0, len(placement) - 1)), schedule in SPLITTING and data.draw(st.booleans())
    program = named(schedule, m, placement, checkpoint_stops(mode, m, len(placement)), [j] if splits else [])[j]
    most = in_flight_peaks(schedule, mode, m, placement, j, splits)
    assert max(each.full + each.inputs_only for each in most) == in_flight(program)
    assert all(each.awaiting_weights < each.full and (mode != "never" or not each.inputs_only) for each in most)
    # A checkpointed micro-batch is full only while it is computed. "except_last" does not checkpoint the last one.
    assert mode == "never" or splits or max(each.full for each in most) <= 1 + (mode == "except_last")


@given(measurements(most_stages=1))
def test_stage_cost_includes_layers_loss_and_recomputation(measured: Measured):
    """The layers and the loss count once, and recomputed forwards count again."""

    def with_loss(profile: Profile) -> Profile:
        return replace(profile, loss=profile.layers[0], others=tuple(map(with_loss, profile.others)))

    costs = replace(measured, profile=with_loss(measured.profile), action=0.0, cpu_contention=2.0).cut(2)
    layers = costs.profile.layers
    work = 2 * (sum(layer.seconds for layer in layers) + costs.profile.loss.seconds)
    forwards = [2 * layer.forward_seconds for layer in layers]
    never, always = (costs.stage_cost(0, 0, len(layers), mode) for mode in ("never", "always"))
    assert never.forward + never.backward == pytest.approx(work)
    assert always.forward + always.recompute + always.backward == pytest.approx(work + sum(forwards))


@given(st.integers(1, 12), st.data())
def test_neighbors_have_fast_links(count: int, data: st.DataObject):
    """Devices with a fast link between them are neighbors in some order, whatever their indices are."""
    fast, slow = Link(1e-5, 1e11), Link(1e-5, 1e9)
    where = data.draw(st.permutations(range(2 * count)))
    pairs = {frozenset(where[2 * k : 2 * k + 2]) for k in range(count)}
    found = orders([(1, 1.0)] * (2 * count), links(2 * count, lambda i, j: fast if {i, j} in pairs else slow))
    assert any(all(frozenset(order[2 * k : 2 * k + 2]) in pairs for k in range(count)) for order in found)
