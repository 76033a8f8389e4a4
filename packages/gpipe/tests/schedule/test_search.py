"""A searched schedule is valid, fits into memory, and is as fast as every named one that fits, whatever the costs."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    Step,
    WorkerSteps,
    in_flight,
    looped_placement,
    named,
    one_forward_one_backward,
    replay,
    search,
    v_placement,
    validate,
)

from ..schedules import idle

DURATIONS = st.integers(0, 8).map(lambda n: n / 4)
"""Sums of these have no rounding errors."""


@dataclass(frozen=True)
class Case:
    """The arguments of a search."""

    microbatches: int
    placement: tuple[int, ...]
    seconds: list[dict[Kind, float]]
    hops: list[float]
    activation_bytes: list[int]
    boundary_bytes: list[int]
    checkpoint_stop: list[int]
    split: frozenset[int]
    memory: tuple[int | None, ...] | None = None

    def search(self) -> Schedule:
        return search(**vars(self))

    def makespan(self, schedule: Schedule) -> float:
        spans = replay(schedule.on(self.placement), self.seconds, self.hops)
        return max(span.end for span in spans.values())

    def peaks(self, worker_steps: WorkerSteps) -> list[int]:
        """The most bytes that each worker holds, if it frees a micro-batch of a stage after its last action."""
        recomputed = {(stage, i) for steps in worker_steps for stage, (kind, i) in steps if kind == Kind.RECOMPUTE}
        found = []
        for steps in worker_steps:
            last = {(stage, action.microbatch): k for k, (stage, action) in enumerate(steps)}
            held, most = dict[tuple[int, int], int](), 0
            for k, (stage, (kind, i)) in enumerate(steps):
                cell = stage, i
                bare = kind == Kind.FORWARD and cell in recomputed
                if kind in (Kind.FORWARD, Kind.RECOMPUTE):
                    held[cell] = self.boundary_bytes[stage] if bare else self.activation_bytes[stage]
                most = max(most, sum(held.values()))
                if last[cell] == k:
                    del held[cell]
            found.append(most)
        return found

    def fits(self, schedule: Schedule) -> bool:
        peaks = self.peaks(schedule.on(self.placement))
        limits = self.memory or (None,) * len(peaks)
        return all(limit is None or peak <= limit for peak, limit in zip(peaks, limits, strict=True))

    def alone(self) -> list[int]:
        """The least that each worker needs: one micro-batch after the other, one stage after the other."""
        stages, needed = range(len(self.placement)), [0] * (max(self.placement) + 1)
        for i in range(self.microbatches):
            order = [Step(j, Action(Kind.FORWARD, i)) for j in stages]
            for j in reversed(stages):
                again = [Action(Kind.RECOMPUTE, i)] if i < self.checkpoint_stop[j] else []
                order += [Step(j, action) for action in (*again, Action(Kind.BACKWARD, i))]
            worker_steps = tuple(tuple(s for s in order if self.placement[s.stage] == r) for r in range(len(needed)))
            needed = [*map(max, needed, self.peaks(worker_steps))]
        return needed


PLACEMENTS = st.one_of(
    st.integers(1, 4).map(range),
    st.integers(1, 3).map(lambda k: v_placement(2 * k)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda each: looped_placement(each[0] * each[1], each[0])),
    st.lists(st.integers(0, 2), min_size=1, max_size=5).map(
        lambda places: [sorted({*places}).index(r) for r in places]
    ),
).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    m, placement = draw(st.integers(1, 7)), draw(PLACEMENTS)
    n = len(placement)

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=n, max_size=n))

    whole = each(st.integers(0, 5))
    case = Case(
        m,
        placement,
        each(st.fixed_dictionaries(dict.fromkeys(Kind, DURATIONS))),
        each(DURATIONS),
        whole,
        [draw(st.integers(0, most)) for most in whole],
        each(st.integers(0, m)),
        draw(st.frozensets(st.sampled_from(range(n)))),
    )
    more = [draw(st.none() | st.integers(0, 12)) for _ in range(max(placement) + 1)]
    limits = tuple(extra if extra is None else least + extra for extra, least in zip(more, case.alone(), strict=True))
    return replace(case, memory=draw(st.sampled_from([None, limits])))


@given(cases())
def test_search_is_as_fast_as_fitting_schedules(case: Case) -> None:
    found = case.search()
    validate(found, case.microbatches, case.placement)
    assert case.fits(found)
    for name in SCHEDULES:
        try:
            other = named(name, case.microbatches, case.placement, case.checkpoint_stop, case.split)
        except ValueError:  # it needs a different placement
            continue
        assert not case.fits(other) or case.makespan(found) <= case.makespan(other)


@given(cases())
def test_search_is_deterministic_and_round_trips(case: Case) -> None:
    found = case.search()
    assert case.search() == found
    assert Schedule.parse(str(found)).on(case.placement) == found.on(case.placement)


@given(cases())
def test_search_respects_splits_and_checkpoints(case: Case) -> None:
    """A stage takes the forwards in the order of micro-batches, as layers with running statistics need it."""
    for j, program in enumerate(case.search()):
        recomputed = {i for kind, i in program if kind == Kind.RECOMPUTE}
        assert recomputed == set(range(min(case.checkpoint_stop[j], case.microbatches)))
        assert j in case.split or all(kind != Kind.BACKWARD_INPUT for kind, _ in program)
        assert [i for kind, i in program if kind == Kind.FORWARD] == [*range(case.microbatches)]


@given(cases(), st.data())
def test_infeasible_memory_raises_with_minimum(case: Case, data: st.DataObject) -> None:
    least = case.alone()
    worker = data.draw(st.sampled_from(range(len(least))))
    limits: list[int | None] = [*least]
    limits[worker] = least[worker] - 1
    message = rf"memory: worker {worker} needs at least {least[worker]} .* got {least[worker] - 1}"
    with pytest.raises(ValueError, match=message):
        replace(case, memory=limits).search()
    assert case.fits(replace(case, memory=tuple(least)).search())


@pytest.mark.parametrize("workers", range(2, 9))
@pytest.mark.parametrize(("memory", "bubble"), [("half", 1 / 2), ("min", 2 / 3)])
def test_search_matches_v_half_and_v_min(workers: int, memory: str, bubble: float) -> None:
    """The published figures, where the actions of a stage take the same time (arXiv 2405.15362).

    Under 1F1B a worker holds as many micro-batches as there are workers, each of them twice as large as here.
    """
    m, place = 2 * workers, v_placement(2 * workers)
    assert in_flight(one_forward_one_backward(m, workers)[0]) == workers
    most = 2 * ((workers + 2) // 2 if memory == "half" else (workers + 4) // 3)
    worker_steps = search(m, place, memory=most).on(place)
    assert all(in_flight([step.action for step in steps]) <= most for steps in worker_steps)
    assert idle(worker_steps, 1, 1, 1) <= bubble * 6 * (workers - 1)


def test_search_matches_zb_v() -> None:
    for workers in range(2, 5):
        found = search(9, v_placement(2 * workers), memory=2 * workers)
        assert idle(found.on(v_placement(2 * workers)), 1, 1, 1) == workers - 1


def test_arguments_are_checked() -> None:
    for wrong in ({"hops": [0.0]}, {"activation_bytes": [1]}, {"boundary_bytes": [1]}, {"seconds": []}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected one per stage \\(2\\)"):
            search(3, [0, 1], **wrong)
    with pytest.raises(ValueError, match=r"memory: expected one number, or one per worker \(2\), got 3"):
        search(3, [0, 1], memory=[1, 2, 3])
    with pytest.raises(ValueError, match="seconds: expected the duration of a recompute of stage 0"):
        search(3, [0, 1], [{Kind.FORWARD: 1.0}] * 2)
    for unfit in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="hops: expected finite, non-negative numbers"):
            search(3, [0, 1], hops=[0.0, unfit])
    with pytest.raises(ValueError, match="checkpoint_stop: expected one number, or one per stage"):
        search(3, [0, 1], checkpoint_stop=[1])


@pytest.mark.parametrize(("m", "placement"), [(0, [0, 1]), (3, [])])
def test_nothing_to_do_is_a_schedule(m: int, placement: list[int]) -> None:
    assert search(m, placement) == Schedule([()] * len(placement))
