"""How long it takes from worker to worker."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.simulate import Link, StageCost, simulate


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10**3)), max_size=4))
def test_each_link_may_have_its_own(links: list[tuple[int, int]]) -> None:
    """A micro-batch crosses each link once forth and once back; one from a worker to itself takes no time."""
    costs = [StageCost(1, 2, boundary_bytes=size) for size in (0, *(size for _, size in links))]
    each = [lambda size, seconds=seconds: seconds + size for seconds, _ in links]
    found = simulate("1f1b", costs, microbatches=1, transfer=each)
    assert found.makespan == 3 * len(costs) + 2 * sum(seconds + size for seconds, size in links)
    alone = simulate("1f1b", costs, microbatches=1, transfer=each, placement=[0] * len(costs))
    assert alone.makespan == 3 * len(costs)
    with pytest.raises(ValueError, match=f"transfer: expected one entry for each of {len(links)} links"):
        simulate("1f1b", costs, microbatches=1, transfer=[*each, 1.0])


@given(st.floats(0, 10), st.floats(1e-3, 1e12), st.integers(0, 10**9), st.integers(0, 10**9))
def test_more_bytes_take_no_less(latency: float, bandwidth: float, a: int, b: int) -> None:
    link = Link(latency, bandwidth)
    assert link(0) == latency
    assert link(min(a, b)) <= link(max(a, b))


@pytest.mark.parametrize(
    "wrong", [{"latency": -1}, {"latency": math.inf}, {"latency": math.nan}, {"bandwidth": 0}, {"bandwidth": math.nan}]
)
def test_what_is_no_link_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Link(**wrong)
