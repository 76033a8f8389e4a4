"""A search for costs of stages is as fast as named schedules by a simulation, and holds no more than it may."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe.schedule import SCHEDULES, search, v_placement
from gpipe.simulate import Link, StageCost, simulate
from gpipe.simulate import search as search_for
from gpipe.timeline import Timeline

TIMES = st.integers(1, 8).map(float)
SIZES = st.integers(1, 9)
COSTS = st.builds(
    lambda f, b, size, bare: StageCost(f, 2 * b, activation_bytes=size + bare, boundary_bytes=bare),
    TIMES, TIMES, SIZES, SIZES,
)  # fmt: skip
LINKS = st.sampled_from([0.0, 2.0, Link(1.0, 4.0)])
MODES = st.sampled_from(["never", "except_last", "always"])


def most(timeline: Timeline, worker: int) -> int:
    """The most bytes that the stages of a worker hold together."""
    held, found = dict[int, int](), 0
    for event in sorted(timeline.events, key=lambda event: event.start):
        if event.device == f"device {worker}":
            held[event.stage] = event.held_bytes or 0
            found = max(found, sum(held.values()))
    return found


@given(st.lists(COSTS, min_size=4, max_size=4), st.booleans(), st.integers(1, 6), MODES, LINKS, st.integers(1, 4))
def test_search_is_as_fast_as_named_schedules(
    costs: list[StageCost], in_v: bool, m: int, mode: str, link: Any, tightness: int
) -> None:
    place = v_placement(4) if in_v else [0, 1, 2, 3]
    options: dict[str, Any] = {"placement": place, "transfer": link, "checkpoint": mode}
    workers = range(max(place) + 1)
    limits = [
        sum(cost.activation_bytes for cost, r in zip(costs, place, strict=True) if r == worker) * tightness
        for worker in workers
    ]
    found = simulate(search_for(costs, microbatches=m, memory=limits, **options), costs, placement=place, transfer=link)
    assert all(most(found, worker) <= limits[worker] for worker in workers)
    for name in SCHEDULES:
        try:
            other = simulate(name, costs, microbatches=m, **options)
        except ValueError:  # it needs a different placement
            continue
        fits = all(most(other, worker) <= limits[worker] for worker in workers)
        assert not fits or found.makespan <= other.makespan


def test_search_defaults() -> None:
    assert search_for([StageCost(1, 2)] * 3, microbatches=4) == search(4, range(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "offload"}, r'checkpoint: expected modes other than "offload".*Schedule\.offloading'),
        ({"checkpoint": ["always"]}, "checkpoint: expected one mode per stage"),
        ({"placement": [0]}, "placement: expected one per stage"),
        ({"transfer": [1.0, 1.0]}, r"transfer: expected one entry per link \(1\)"),
        ({"memory": 3}, "memory: worker 0 needs at least 4"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search_for([StageCost(1, 2, activation_bytes=4)] * 2, microbatches=2, **options)
