"""How long it takes from worker to worker."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.timeline._hops import Link, hop_seconds

CROSSING = st.lists(st.none() | st.integers(0, 10**9), max_size=5)
"""For each stage, the bytes that come from another worker."""


@given(CROSSING, st.floats(0, 10))
def test_a_number_holds_for_every_link_that_leads_to_another_worker(crossing: list[int | None], seconds: float) -> None:
    found = hop_seconds(seconds, crossing)
    assert found == [seconds if j and size is not None else 0.0 for j, size in enumerate(crossing)]


@given(CROSSING.filter(len), st.data())
def test_each_link_may_have_its_own(crossing: list[int | None], data: st.DataObject) -> None:
    links = st.floats(0, 10) | st.builds(Link, st.floats(0, 1), st.floats(1, 1e12))
    count = len(crossing) - 1
    each = data.draw(st.lists(links, min_size=count, max_size=count))
    alone = [hop_seconds(link, [None, size])[1] for link, size in zip(each, crossing[1:], strict=True)]
    assert hop_seconds(each, crossing) == [0.0, *alone]
    with pytest.raises(ValueError, match=f"one entry for each of {count} links"):
        hop_seconds([*each, 1.0], crossing)


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
