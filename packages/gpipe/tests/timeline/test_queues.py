"""Links that carry one thing at a time: first come, first served, and never faster than any number at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe import Event, Timeline
from gpipe.schedule import Schedule, fill_drain
from gpipe.simulate import Link, StageCost, makespan, simulate

from ..timelines import fewer, problems, schedules

sixteenths = st.integers(1, 64).map(lambda number: number / 16)
sizes = st.integers(0, 32)
Problem = tuple[Schedule, list[StageCost], list[Link]]
Way = tuple[float, float, float]
"""When something comes to a link, how long it keeps the link, and when it arrives."""


def costs_of(times: st.SearchStrategy[float]) -> st.SearchStrategy[StageCost]:
    return st.builds(StageCost, times, times, times, times, times, boundary_bytes=sizes)


@st.composite
def crowded(draw: st.DrawFn) -> Problem:
    """Stages on a worker each, and links of which some are the same."""
    schedule = Schedule(draw(schedules()))
    n = len(schedule)
    link = st.builds(Link, sixteenths, st.sampled_from([4.0, 16.0]), st.sampled_from([None, "a", "b"]))
    links = draw(st.lists(link, min_size=n - 1, max_size=n - 1))
    return schedule, draw(st.lists(costs_of(sixteenths), min_size=n, max_size=n)), links


def unnamed(links: list[Link]) -> list[Link]:
    return [Link(link.latency, link.bandwidth) for link in links]


def starts(timeline: Timeline) -> dict[tuple[int, str, int], float]:
    return {(e.stage, e.kind, e.microbatch): e.start for e in timeline.events}


def crossings(timeline: Timeline, costs: list[StageCost], links: list[Link]) -> dict[str, list[tuple[Event, int]]]:
    """For each name, the events whose results come to that link, in order, with the stage that they cross before."""
    found: dict[str, list[tuple[Event, int]]] = {}
    for event in sorted(timeline.events, key=lambda e: (e.end, e.stage, e.kind, e.microbatch)):
        back = event.kind in ("backward", "backward_input")
        hop = event.stage if back else event.stage + 1
        if (back or event.kind == "forward") and 0 < hop <= len(links) and links[hop - 1].name is not None:
            found.setdefault(str(links[hop - 1].name), []).append((event, hop))
    return found


def busy(costs: list[StageCost], links: list[Link], hop: int) -> float:
    return costs[hop].boundary_bytes / links[hop - 1].bandwidth


def overlap(timeline: Timeline, costs: list[StageCost], links: list[Link]) -> bool:
    """Whether something comes to a named link while that is busy."""
    return any(
        a.end + busy(costs, links, hop) > b.end
        for ways in crossings(timeline, costs, links).values()
        for (a, hop), (b, _) in pairwise(ways)
    )


@fewer
@given(crowded())
def test_nothing_is_earlier_than_without_contention_and_all_is_equal_where_none_meets_another(problem: Problem):
    schedule, costs, links = problem
    free = simulate(schedule, costs, transfer=unnamed(links), placement=range(len(costs)))
    shared = simulate(schedule, costs, transfer=links, placement=range(len(costs)))
    before, after = starts(free), starts(shared)
    assert all(after[step] >= start for step, start in before.items())
    if not overlap(free, costs, links):
        assert shared.events == free.events


@fewer
@given(crowded())
def test_each_link_serves_what_comes_first(problem: Problem):
    """Arrivals computed anew from when steps ended: every step begins as soon as its worker and its input are there."""
    schedule, costs, links = problem
    timeline = simulate(schedule, costs, transfer=links, placement=range(len(costs)))
    turns: dict[tuple[int, str, int], float] = {}
    for ways in crossings(timeline, costs, links).values():
        free = 0.0
        for event, hop in ways:
            turns[event.stage, event.kind, event.microbatch] = begin = max(event.end, free)
            free = begin + busy(costs, links, hop)
    when = {(e.stage, e.kind, e.microbatch): e for e in timeline.events}
    for lane in timeline.lanes.values():
        clock = 0.0
        for event in lane:
            arrival = 0.0
            for source, hop in sources(event, when):
                key = source.stage, source.kind, source.microbatch
                arrival = turns.get(key, source.end) + links[hop - 1](costs[hop].boundary_bytes)
            assert event.start == max(clock, arrival)
            assert event.wait == event.start - clock
            clock = event.end


def sources(event: Event, when: dict[tuple[int, str, int], Event]) -> list[tuple[Event, int]]:
    if event.kind == "forward":
        keys, hop = [(event.stage - 1, "forward", event.microbatch)], event.stage
    elif event.kind in ("backward", "backward_input"):
        kinds = ("backward", "backward_input")
        keys, hop = [(event.stage + 1, kind, event.microbatch) for kind in kinds], event.stage + 1
    else:
        return []
    return [(when[key], hop) for key in keys if key in when]


@fewer
@given(crowded())
def test_the_makespan_is_that_of_the_simulation(problem: Problem):
    schedule, costs, links = problem
    given = {"transfer": links, "placement": range(len(costs))}
    assert makespan(schedule, costs, **given) == simulate(schedule, costs, **given).makespan


@fewer
@given(problems(), sixteenths)
def test_a_link_that_takes_no_time_keeps_nobody(problem: tuple[Schedule, list[StageCost], list[int]], latency: float):
    schedule, costs, placement = problem
    free, shared = (
        simulate(schedule, costs, placement=placement, transfer=Link(latency, name=name)) for name in (None, "a")
    )
    assert starts(free) == starts(shared)


def test_two_micro_batches_at_once_on_one_link():
    costs = [StageCost(1, 1, boundary_bytes=30)] * 2
    timeline = simulate(fill_drain(2, 2), costs, transfer=Link(0.5, 10, "wire"))
    assert starts(timeline) == {
        (0, "forward", 0): 0, (0, "forward", 1): 1,
        (1, "forward", 0): 4.5,  # sent from 1 to 4, and 0.5 on its way
        (1, "forward", 1): 7.5,  # came at 2, sent from 4 to 7
        (1, "backward", 1): 8.5, (1, "backward", 0): 9.5,
        (0, "backward", 1): 13.0,
        (0, "backward", 0): 16.0,
    }  # fmt: skip


def test_hops_of_one_name_are_one_link():
    costs = [StageCost(1, 0, boundary_bytes=10)] * 3
    apart = makespan("fill_drain", costs, microbatches=4, transfer=[Link(0, 10, "a"), Link(0, 10, "b")])
    shared = makespan("fill_drain", costs, microbatches=4, transfer=Link(0, 10, "a"))
    free = makespan("fill_drain", costs, microbatches=4, transfer=Link(0, 10))
    assert free <= apart < shared


def test_a_schedule_that_never_ends():
    schedule = Schedule.parse("F0 B0 F1 B1\nF0 F1 B0 B1")
    with pytest.raises(ValueError, match="the workers wait for each other forever: B0@0 for B0@1, F1@1 for F1@0"):
        simulate(schedule, [StageCost(1, 1, boundary_bytes=1)] * 2, transfer=Link(1, 1, "a"))


def test_wrong_arguments():
    with pytest.raises(TypeError, match="name: expected text, got 3"):
        Link(name=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="transfer: expected one entry for each of 1 links, got 2"):
        simulate("1f1b", [StageCost(1, 1)] * 2, microbatches=2, transfer=[Link(name="a")] * 2)
