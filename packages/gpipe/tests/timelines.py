"""Schedules, costs and timelines to draw from."""

from hypothesis import settings
from hypothesis import strategies as st

from gpipe import Event, Timeline
from gpipe.schedule import Schedule
from gpipe.simulate import StageCost, simulate

from .schedules import scheduled

KINDS = ("forward", "recompute", "backward", "backward_input", "backward_weight")

# Whole runs are slow to draw, so use a third of the usual number of examples.
fewer = settings(max_examples=settings().max_examples // 3)

seconds = st.floats(0, 100, allow_subnormal=False)
# Sixteenths add up exactly, in any order.
exact_seconds = st.integers(0, 1600).map(lambda sixteenths: sixteenths / 16)
sizes = st.integers(0, 2**40)

Problem = tuple[Schedule, list[StageCost], list[int]]
"""A schedule, a cost per stage, and a worker per stage."""


def stage_costs(times: st.SearchStrategy[float] = exact_seconds) -> st.SearchStrategy[StageCost]:
    return st.builds(
        StageCost,
        forward=times,
        backward=times,
        recompute=st.none() | times,
        backward_input=times,
        backward_weight=times,
        activation_bytes=sizes,
        boundary_bytes=sizes,
        layers=st.text(max_size=8),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    schedule, _, _ = draw(scheduled())
    n = len(schedule)
    costs = draw(st.lists(stage_costs(), min_size=n, max_size=n))
    placement = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return schedule, costs, placement


@st.composite
def simulated(draw: st.DrawFn) -> Timeline:
    schedule, costs, placement = draw(problems())
    return simulate(schedule, costs, placement=placement, transfer=draw(exact_seconds))


@st.composite
def events(draw: st.DrawFn) -> Event:
    """Draw arbitrary measurements: stages may overlap, in any order."""
    start = draw(seconds)
    return Event(
        stage=draw(st.integers(0, 4)),
        microbatch=draw(st.integers(0, 120)),
        kind=draw(st.sampled_from(KINDS)),
        device=draw(st.sampled_from(["cpu", "cuda:0", "<&\"'>"])),
        start=start,
        end=start + draw(seconds),
        wait=draw(seconds),
        bytes_moved=draw(sizes),
        layers=draw(st.text(max_size=8)),
        held_bytes=draw(st.none() | sizes),
    )


def recorded() -> st.SearchStrategy[Timeline]:
    workers = st.dictionaries(st.integers(0, 4), st.integers(0, 2))
    return st.builds(Timeline, st.lists(events(), max_size=12), workers)


timelines = st.one_of(simulated(), recorded())
