"""Stages in the shape of a V: bubbles and memory as published."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import Kind, Schedule, Step, dualpipev, in_flight, one_forward_one_backward, v_placement, zbv

from ..schedules import held, idle, spans_of

each_maker = pytest.mark.parametrize("make", [zbv, dualpipev])
counts = st.integers(1, 20)
workers = st.integers(1, 5)


def on_a_v(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    return schedule.on(v_placement(len(schedule)))


@given(workers)
def test_v_placement_mirrors_stages(k: int) -> None:
    assert v_placement(2 * k) == [min(j, 2 * k - 1 - j) for j in range(2 * k)]


@pytest.mark.parametrize("make", [zbv, dualpipev, lambda m, n: v_placement(n)])
@given(st.integers(0, 4))
def test_an_odd_number_of_stages_is_refused(make: Callable[..., object], k: int) -> None:
    with pytest.raises(ValueError, match=f"two stages on every worker.*got {2 * k + 1} stages"):
        make(3, 2 * k + 1)


@each_maker
@given(m=counts, k=workers, data=st.data())
def test_unsplit_stages_keep_their_order(make: Callable[..., Schedule], m: int, k: int, data: st.DataObject) -> None:
    split = data.draw(st.sets(st.integers(0, 2 * k - 1)))
    for j, (some, every) in enumerate(zip(make(m, 2 * k, 0, split), make(m, 2 * k), strict=True)):
        whole = [a._replace(kind=Kind.BACKWARD) if a.kind == Kind.BACKWARD_INPUT else a for a in every]
        assert list(some) == (list(every) if j in split else [a for a in whole if a.kind != Kind.BACKWARD_WEIGHT])


@each_maker
@given(m=counts, k=workers)
def test_memory_is_bounded_in_micro_batches(make: Callable[..., Schedule], m: int, k: int) -> None:
    most = max(held(on_a_v(make(m, 2 * k))))
    assert most <= max(held(on_a_v(make(m + 1, 2 * k)))) <= 2 * k + (make is dualpipev)


@given(counts, workers, st.integers(1, 5))
def test_zbv_has_no_bubble(more: int, k: int, unit: int) -> None:
    """The published bubble is none, of the longest time that a worker takes (arXiv 2405.15362, table 2)."""
    m = 2 * k - 2 + more
    worker_steps = on_a_v(zbv(m, 2 * k))
    spans = spans_of(worker_steps, unit, unit, unit)
    for r, steps in enumerate(worker_steps):
        assert spans[steps[0]].start == r * unit
        assert all(spans[step].wait == 0 for step in steps[1:])
    assert idle(worker_steps, unit, unit, unit) == (k - 1) * unit  # at the ends


@given(counts, workers)
def test_zbv_holds_no_more_than_1f1b(m: int, k: int) -> None:
    """Two of these stages are as large as one stage of 1F1B."""
    most = held(on_a_v(zbv(m, 2 * k)))
    assert max(most) <= 2 * in_flight(one_forward_one_backward(max(m, k), k)[0])
    if m >= 2 * k - 1:
        assert most == [2 * k] * k


@given(counts, workers, st.data())
def test_dualpipev_bubble_matches_publication(more: int, k: int, data: st.DataObject) -> None:
    """A full backward takes at least as long as a forward, and the input part at least as long as the weight part."""
    i = data.draw(st.integers(1, 9))
    w = data.draw(st.integers(1, i))
    f = data.draw(st.integers(1, i + w))
    worker_steps = on_a_v(dualpipev(2 * k - 1 + more, 2 * k))
    assert idle(worker_steps, f, i, w) <= (k - 1) * ((f + i + w) + (i + w) - 3 * w)
    assert idle(worker_steps, f, f, f) == (k - 1) * f


@given(counts, workers)
def test_dualpipev_memory_matches_publication(m: int, k: int) -> None:
    most = held(on_a_v(dualpipev(m, 2 * k)))
    assert max(most) <= 2 * k + 1
    if m >= 2 * k:
        assert most == [2 * k + 1] * k
