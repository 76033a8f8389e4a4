"""Loads and unloads: what is computed is loaded, no more than fits, and no more often than need be."""

from collections import Counter
from functools import cache
from itertools import accumulate, chain, groupby, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import Action, Kind, Schedule, Step, WorkerSteps, named, replay
from gpipe.schedule._actions import MOVES
from gpipe.schedule._loads import expect_loaded, with_loads
from gpipe.simulate import StageCost, makespan, simulate


@st.composite
def step_lists(draw: st.DrawFn) -> WorkerSteps:
    """The steps of a few workers, in any order, which need not make sense."""
    workers = draw(st.integers(1, 3))
    owner = draw(st.lists(st.integers(0, workers - 1), min_size=1, max_size=6))
    lines = []
    for worker in range(workers):
        own = [j for j, each in enumerate(owner) if each == worker]
        order = draw(st.lists(st.sampled_from(own), max_size=12)) if own else []
        lines.append(tuple(Step(j, Action(Kind.FORWARD, k)) for k, j in enumerate(order)))
    return tuple(lines)


@given(step_lists(), st.sets(st.integers(0, 5)), st.integers(1, 4))
def test_loads_precede_computations_within_room(worker_steps: WorkerSteps, offloaded: set[int], room: int) -> None:
    found = with_loads(worker_steps, offloaded, room)
    expect_loaded(found, offloaded)
    assert max(most_loaded(found)) <= room
    assert [[step for step in line if step.action.kind not in MOVES] for line in found] == [
        [*line] for line in worker_steps
    ]
    moves = [step for step in chain.from_iterable(found) if step.action.kind in MOVES]
    assert len({*moves}) == len(moves)  # numbered
    counts = Counter(step.action.kind for step in moves)
    assert counts[Kind.LOAD] == counts[Kind.UNLOAD]  # nothing remains
    assert with_loads(found, offloaded, room) == found or not moves


def most_loaded(worker_steps: WorkerSteps) -> list[int]:
    """The largest number of stages that each worker holds at once."""
    most = []
    for line in worker_steps:
        changes = [(step.action.kind == Kind.LOAD) - (step.action.kind == Kind.UNLOAD) for step in line]
        most.append(max(accumulate(changes, initial=0)))
    return most


def fewest(visits: tuple[int, ...], room: int) -> int:
    """The fewest loads of a worker that computes ``visits``, by trying out everything."""

    @cache
    def rest(at: int, resident: frozenset[int]) -> int:
        if at == len(visits):
            return 0
        if visits[at] in resident:
            return rest(at + 1, resident)
        kept = [resident] if len(resident) < room else [resident - {each} for each in resident]
        return 1 + min(rest(at + 1, each | {visits[at]}) for each in kept)

    return rest(0, frozenset())


@given(st.lists(st.integers(0, 4), max_size=9), st.integers(1, 4))
def test_it_loads_as_rarely_as_can_be(order: list[int], room: int) -> None:
    """Although it loads a stage before it is needed."""
    line = tuple(Step(j, Action(Kind.FORWARD, k)) for k, j in enumerate(order))
    (found,) = with_loads((line,), range(5), room)
    visits = tuple(j for j, _ in groupby(order))
    assert sum(step.action.kind == Kind.LOAD for step in found) == fewest(visits, room)


@pytest.mark.parametrize(("stages", "room"), [*product(range(1, 7), range(1, 4))])
def test_breadth_first_loads_stages_twice(stages: int, room: int) -> None:
    whole = named("looped_bfs", 5, [0] * stages).loading([0] * stages, room=room)
    loads = Counter(stage for stage, program in enumerate(whole) for kind, _ in program if kind == Kind.LOAD)
    assert [loads[j] for j in range(stages)] == [2] * (stages - room) + [1] * min(stages, room)


@pytest.mark.parametrize(
    "placement", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 2, 0], [0, 1, 2, 3]]
)
def test_any_stages_may_be_breadth_first(placement: list[int]) -> None:
    """Each worker finishes the forwards of a stage before it starts the next stage."""
    worker_steps = named("looped_bfs", 3, placement).on(placement)
    replay(worker_steps)
    for worker, line in enumerate(worker_steps):
        own = [j for j, each in enumerate(placement) if each == worker]
        assert [stage for stage, _ in groupby(step.stage for step in line)] == [*own, *own[-2::-1]]


def test_text_is_read_again() -> None:
    whole = named("looped_bfs", 2, [0, 0, 1]).loading([0, 0, 1], [0, 2])
    assert str(whole) == "L0@0 F0@0 F1@0 F0@1 F1@1 B1@1 B0@1 B1@0 B0@0 U0@0\nL0@2 F0@2 F1@2 B1@2 B0@2 U0@2"
    assert Schedule.parse(str(whole)) == whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("L0 F0 U0 B0", "B0@0 needs the parameters of stage 0"),
        ("F0 L0 B0 U0", "F0@0 needs the parameters of stage 0"),
        ("L0 L1 F0 B0 U0", "L1@0 while stage 0 is loaded"),
        ("L0 F0 B0 U0 U1", "U1@0 while stage 0 is not loaded"),
        ("L0 F0 B0 U0\nL0@1 F0@1 B0@1", "L0@1, but the parameters of stage 1 are not offloaded"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    schedule = Schedule.parse(text)
    with pytest.raises(ValueError, match=message):
        schedule.loading(range(len(schedule)), [0])


@given(st.integers(1, 6), st.integers(1, 5), st.floats(0, 8), st.floats(0, 8))
def test_loads_take_their_time_beside_the_work(stages: int, m: int, load: float, unload: float) -> None:
    """The first load cannot overlap. A device is never faster than its work, or its link in either direction."""
    cost, place = StageCost(1, 2, load=load, unload=unload), [0] * stages
    whole = named("looped_bfs", m, place).loading(place)
    took = simulate(whole, [cost] * stages).makespan
    loads = stages + max(0, stages - 2)
    work = 3 * m * stages
    assert took >= max(load + work, loads * load) - 1e-9
    assert took <= load * loads + work + unload * stages + 1e-9
    assert (
        simulate(whole, [StageCost(1, 2)] * stages).makespan
        == work
        == makespan("looped_bfs", [cost] * stages, microbatches=m, placement=place)
    )
    if load <= m and unload <= 2 * m:  # all of it is hidden but for the first load and the last gradients
        assert took == pytest.approx(load + work + unload)
