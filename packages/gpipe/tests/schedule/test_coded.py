"""Actions as numbers start when they do in a replay of their schedule, and hold the same memory."""

from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import Kind, Program, Schedule, replay
from gpipe.schedule._coded import Coded
from gpipe.schedule._problem import Problem

from ..schedules import Scheduled, scheduled, shuffled


def coded_for(m: int, placement: list[int], durations: dict[Kind, float], limit: int | None = None) -> Coded:
    n, workers = len(placement), max(placement, default=-1) + 1
    whole, hops = tuple(2 + j for j in range(n)), tuple(j / 2 for j in range(n))
    return Coded(
        Problem(m, tuple(placement), [durations] * n, hops, whole, (1,) * n, (limit,) * workers, (m,) * n, (True,) * n)
    )


durations = st.fixed_dictionaries(dict.fromkeys(Kind, st.integers(0, 8).map(float)))


@given(scheduled(), durations)
def test_actions_start_when_they_do_in_a_replay(case: Scheduled, took: dict[Kind, float]) -> None:
    schedule, m, placement = case
    worker_steps, coded = schedule.on(placement), coded_for(m, placement, took)
    order = coded.encode(worker_steps)
    assert coded.worker_steps(order) == worker_steps
    found = coded.replay(order)
    assert found is not None
    spans = replay(worker_steps, coded.problem.seconds, coded.problem.hops)
    assert found[0] == max(span.end for span in spans.values()) == coded.makespan(order)
    for steps, line in zip(worker_steps, order, strict=True):
        assert [found[1][code] for code in line] == [spans[step].start for step in steps]


@given(shuffled(), durations)
def test_orders_that_wait_forever_have_no_makespan(programs: list[Program], took: dict[Kind, float]) -> None:
    m = 1 + max((i for program in programs for _, i in program), default=-1)
    coded = coded_for(m, list(range(len(programs))), took)
    order = coded.encode([[(j, action) for action in program] for j, program in enumerate(programs)])
    try:
        replay(coded.worker_steps(order), coded.problem.seconds, coded.problem.hops)
    except ValueError:
        assert coded.replay(order) is None
    else:
        assert coded.replay(order) is not None


@given(scheduled(), st.integers(0, 30))
def test_order_fits_within_memory_limits(case: Scheduled, limit: int) -> None:
    schedule, m, placement = case
    coded = coded_for(m, placement, dict.fromkeys(Kind, 1.0), limit)
    assert coded.fits(coded.encode(schedule.on(placement))) == (max(peaks(coded, schedule)) <= limit)


def peaks(coded: Coded, schedule: Schedule) -> list[int]:
    """The most bytes of each worker, counted cell by cell."""
    found = []
    for steps in schedule.on(coded.problem.placement):
        held, most = 0, 0
        for stage, (kind, i) in steps:
            held += coded.problem.changes(stage, i)[kind]
            most = max(most, held)
        found.append(most)
    return found
