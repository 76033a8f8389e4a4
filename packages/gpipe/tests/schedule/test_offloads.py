"""Offloads and prefetches of saved tensors: they are on the device for each backward, but for few cells at a time."""

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import Action, Kind, Schedule, Step, WorkerSteps, in_flight, named, replay, validate
from gpipe.schedule._actions import TRANSFERS, TRIPS
from gpipe.schedule._loads import expect_loaded, with_loads
from gpipe.schedule._offloads import cells_offloaded, expect_prefetched, with_offloads
from gpipe.simulate import StageCost, makespan, simulate

from ..schedules import CHOICES, some_schedule

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@st.composite
def step_lists(draw: st.DrawFn) -> tuple[WorkerSteps, int]:
    """Draw the steps of any schedule, or only its forwards or backwards, and its stages."""
    m, stages = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    placement = draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages))
    worker_steps = some_schedule(draw(CHOICES), m, placement, draw(st.integers(0, m))).on(placement)
    part = draw(st.sampled_from(["all", "forwards", "backwards"]))
    if part != "all":
        worker_steps = tuple(
            tuple(step for step in line if (step.action.kind == Kind.FORWARD) == (part == "forwards"))
            for line in worker_steps
        )
    return worker_steps, stages


@given(step_lists(), st.sets(st.integers(0, 3)), st.integers(1, 4))
def test_offloaded_cells_return_within_room(given: tuple[WorkerSteps, int], offloading: set[int], room: int) -> None:
    worker_steps, _ = given
    found = with_offloads(worker_steps, offloading, room)
    steps = [step for line in worker_steps for step in line]
    whole = any(step.action.kind == Kind.FORWARD for step in steps) == any(s.action.kind in BACKWARDS for s in steps)
    if whole:
        expect_prefetched(found, offloading)
    assert [[step for step in line if step.action.kind not in TRIPS] for line in found] == [
        [*line] for line in worker_steps
    ]
    moved = Counter(step for line in found for step in line if step.action.kind in TRIPS)
    assert {*moved.values()} <= {1}
    assert {step.stage for step in moved} <= offloading
    for line in found:
        computing = [step for step in line if step.action.kind not in TRANSFERS]
        place = {(s.stage, s.action.microbatch, s.action.kind in BACKWARDS): k for k, s in enumerate(computing)}
        here = set[tuple[int, int]]()
        for k, step in enumerate(line):
            cell = step.stage, step.action.microbatch
            if step.action.kind == Kind.OFFLOAD:  # only prefetches are between it and its forward
                before = next(s for s in reversed(line[:k]) if s.action.kind not in TRIPS)
                assert before == Step(step.stage, Action(Kind.FORWARD, step.action.microbatch))
                here.discard(cell)
            elif step.action.kind in (Kind.FORWARD, Kind.PREFETCH) and step.stage in offloading:
                here.add(cell)
            elif step.action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                here.discard(cell)
            if step.action.kind == Kind.PREFETCH:
                ahead = sum(s.action.kind not in TRANSFERS for s in line[:k])
                assert place[(*cell, True)] - ahead == min(room - 1, place[(*cell, True)])
        if whole:
            for i, j in here:
                assert (i, j) not in cells_offloaded(found)
    assert with_offloads(found, offloading, room) == found or not moved


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))
def test_worker_holds_at_most_room_cells(m: int, stages: int, room: int) -> None:
    """All forwards are before all backwards. Cells are computing, arriving, or kept for the first backwards."""
    whole = named("looped_bfs", m, [0] * stages).offloading([0] * stages, room=room)
    held = most = 0
    for _, (kind, _) in chain.from_iterable(whole.on([0] * stages)):
        held += (kind in (Kind.FORWARD, Kind.PREFETCH)) - (kind in (Kind.BACKWARD, Kind.OFFLOAD))
        most = max(most, held)
    assert held == 0
    assert most <= room
    assert max(map(in_flight, whole)) <= room


@given(step_lists(), st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)))
def test_loads_and_offloads_are_independent(
    given: tuple[WorkerSteps, int], loaded: set[int], offloading: set[int]
) -> None:
    """They may be added in either order."""
    worker_steps, _ = given
    first = with_offloads(with_loads(worker_steps, loaded), offloading)
    second = with_loads(with_offloads(worker_steps, offloading), loaded)
    for found in (first, second):
        expect_loaded(found, loaded)
    for kinds in (TRIPS, tuple({*TRANSFERS} - {*TRIPS})):
        a, b = ([[s for s in line if s.action.kind in kinds] for line in found] for found in (first, second))
        assert a == b


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "fill_drain"])
def test_text_is_read_again_and_is_valid(name: str) -> None:
    whole = named(name, 5, range(3)).offloading(range(3))
    assert Schedule.parse(str(whole)) == whole
    validate(whole, 5, range(3))
    assert any(kind == Kind.OFFLOAD for kind, _ in whole[0])


def test_1f1b_keeps_cells_whose_backward_is_near() -> None:
    whole = named("1f1b", 4, range(3)).offloading(range(3))
    assert [str(Schedule([program])) for program in whole] == [
        "F0 O0 F1 P0 O1 F2 O2 B0 P1 F3 P2 O3 B1 P3 B2 B3",
        "F0 F1 O1 B0 P1 F2 O2 B1 P2 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 O0 B0", "B0@0 needs the saved tensors of its cell"),
        ("F0 O0 I0 P0 W0", "I0@0 needs the saved tensors of its cell"),
        ("F0 I0 O0 W0", "W0@0 needs the saved tensors of its cell"),
        ("O0 F0 P0 B0", "O0@0, but micro-batch 0 has no saved tensors there"),
        ("F0 O0 O0 P0 B0", "O0@0, but micro-batch 0 has no saved tensors there"),
        ("F0 P0 B0", "P0@0, but micro-batch 0 was not offloaded before it"),
        ("F0 B0\nF0 O0 P0 B0", "O0@1, but stage 1 does not have checkpoint='offload'"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    schedule = Schedule.parse(text)
    with pytest.raises(ValueError, match=message):
        schedule.offloading(range(len(schedule)), [0])


@given(st.integers(1, 6), st.integers(1, 4), st.floats(0, 8), st.floats(0, 8))
def test_transfers_take_their_time_beside_the_work(stages: int, m: int, out: float, back: float) -> None:
    """A device is never faster than its work, or its link in either direction. Short transfers are hidden."""
    cost, place = StageCost(1, 2, offload=out, prefetch=back), [0] * stages
    whole = named("looped_bfs", m, place).offloading(place)
    moved = len(cells_offloaded(whole.on(place)))
    took, work = simulate(whole, [cost] * stages).makespan, 3 * m * stages
    assert took >= max(work, moved * out, moved * back) - 1e-9
    assert took <= work + moved * (out + back) + 1e-9
    if out <= 1 and back <= 1:
        assert took == pytest.approx(work)
    by_name = makespan("looped_bfs", [cost] * stages, microbatches=m, placement=place, checkpoint="offload")
    assert by_name == pytest.approx(took)


def test_a_simulation_counts_bytes_and_shares_the_link() -> None:
    cost = StageCost(1, 2, offload=1, prefetch=1, load=1, unload=1, activation_bytes=100, boundary_bytes=10)
    whole = named("fill_drain", 6, [0, 0])
    timelines = [simulate(whole, [cost] * 2, checkpoint=mode) for mode in ("never", "always", "offload")]
    never, always, offload = (sum((each.peak_bytes or {}).values()) for each in timelines)
    assert always <= offload < never / 2
    loaded = whole.loading([0, 0])
    both = simulate(loaded.offloading([0, 0]), [cost] * 2).makespan
    assert both >= max(simulate(each, [cost] * 2).makespan for each in (loaded, whole.offloading([0, 0])))
    assert len(replay(loaded.offloading([0, 0]).on([0, 0]))) == sum(map(len, loaded.offloading([0, 0])))
