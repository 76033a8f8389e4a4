"""Random schedules: the steps of a training step in any order that respects their requirements."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, cycle, pairwise, product

import pytest
import torch
from hypothesis import strategies as st

from gpipe import GPipe
from gpipe.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Program,
    Schedule,
    Span,
    Step,
    WorkerSteps,
    dependencies_of,
    fill_drain,
    looped_placement,
    named,
    one_forward_one_backward,
    replay,
    split_forward_backward,
    v_placement,
    zero_bubble,
)

ALONE = ("1f1b", "fill_drain", "interleaved", "zero_bubble")
"""Schedules that differ when each stage has its own worker."""
each_schedule = pytest.mark.parametrize("schedule", ALONE)

LOOPED = ("interleaved", "interleaved_zero_bubble", "looped_bfs")
V_SHAPED = ("dualpipev", "zbv")

CHOICES = st.lists(st.integers(0, 15), max_size=40).map(tuple)
"""The choices made by :func:`some_schedule`."""

Scheduled = tuple[Schedule, int, list[int]]
"""A schedule, its micro-batches, and the worker of each stage."""

Needs = dict[Step, set[Step]]
"""For each step, the steps that must precede it."""


def some_schedule(
    choices: Sequence[int], microbatches: int, placement: Sequence[int], checkpoint_stop: int, *, in_order: bool = False
) -> Schedule:
    """A valid schedule for stages on the workers of ``placement``.

    Args:
        choices: used in turn for every decision: which backwards are split, which recomputations are written down, and
            which of the steps that could come next does. Any numbers do.
        in_order: whether a stage takes the forwards in the order of the micro-batches.
    """
    decisions = cycle(choices or [0])
    needs = dict(_needs(decisions, microbatches, len(placement), checkpoint_stop))
    if in_order:
        for i, j in product(range(1, microbatches), range(len(placement))):
            needs[Step(j, Action("forward", i))].add(Step(j, Action("forward", i - 1)))
    order = list(_ordered(decisions, needs))
    programs = [[step.action for step in order if step.stage == j] for j in range(len(placement))]
    workers = range(max(placement, default=-1) + 1)
    worker_steps = tuple(tuple(step for step in order if placement[step.stage] == worker) for worker in workers)
    return Schedule(programs, worker_steps)


def _needs(decisions: Iterator[int], m: int, n: int, stop: int) -> Iterator[tuple[Step, set[Step]]]:
    for i in range(m):
        later: set[Step] = set()
        for j in reversed(range(n)):
            forward, recompute = Step(j, Action("forward", i)), Step(j, Action("recompute", i))
            splits, says = divmod(next(decisions) % 4, 2)
            backward = Step(j, Action("backward_input" if splits else "backward", i))
            yield forward, {Step(j - 1, forward.action)} if j else set()
            if says and i < stop:
                yield recompute, {forward}
            yield backward, {recompute if says and i < stop else forward} | later
            if splits:
                yield Step(j, Action("backward_weight", i)), {backward}
            later = {backward}


def _ordered(decisions: Iterator[int], needs: Needs) -> Iterator[Step]:
    done: set[Step] = set()
    while needs:
        ready = sorted(step for step, before in needs.items() if before <= done)
        step = ready[next(decisions) % len(ready)]
        del needs[step]
        done.add(step)
        yield step


def held(worker_steps: WorkerSteps) -> list[int]:
    """Return, for each worker, the largest number of micro-batches in flight."""
    return [max(accumulate(_changes(steps)), default=0) for steps in worker_steps]


def _changes(steps: Sequence[Step]) -> Iterator[int]:
    last = {(stage, action.microbatch): step for step in steps for stage, action in [step]}
    for step in steps:
        yield (step.action.kind == Kind.FORWARD)
        yield -(last[step.stage, step.action.microbatch] == step)


def spans_of(worker_steps: WorkerSteps, f: float, i: float, w: float) -> dict[Step, Span]:
    """When each step runs if a forward takes f, the two parts of a backward i and w, and the whole i + w."""
    seconds = {Kind.FORWARD: f, Kind.BACKWARD: i + w, Kind.BACKWARD_INPUT: i, Kind.BACKWARD_WEIGHT: w}
    stages = 1 + max(step.stage for step in chain.from_iterable(worker_steps))
    return replay(worker_steps, [seconds] * stages)


def idle(worker_steps: WorkerSteps, f: float, i: float, w: float) -> float:
    """Return the idle time of the busiest worker."""
    spans = spans_of(worker_steps, f, i, w)
    busy = max(sum(spans[step].end - spans[step].start for step in steps) for steps in worker_steps)
    return max(span.end for span in spans.values()) - busy


@st.composite
def balances(draw: st.DrawFn, layers: int, stages: int = 5) -> list[int]:
    """Draw a balance of at most ``stages`` stages."""
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=stages - 1))) if layers > 1 else []
    return [b - a for a, b in pairwise([0, *cuts, layers])]


def balance_by(seed: int, layers: int, stages: int) -> list[int]:
    """Return a random balance of at most ``stages`` stages, all equally likely."""
    cuts = torch.randperm(layers - 1, generator=torch.Generator().manual_seed(seed))[: min(stages, layers) - 1] + 1
    return [b - a for a, b in pairwise([0, *sorted(cuts.tolist()), layers])]


def suited(schedule: str, pipe: GPipe) -> str:
    """Return the schedule, or "zero_bubble" if it requires a different placement of stages."""
    places = [device.index for device in pipe.devices]
    in_v = len(places) % 2 == 0 and places == [*v_placement(len(places))]
    wrong = in_v if schedule in LOOPED else not in_v and schedule in V_SHAPED
    return "zero_bubble" if wrong else schedule


counts = st.integers(1, 7)


sizes = st.tuples(counts, counts)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int]:
    """Micro-batches, stages, and how many of the micro-batches are checkpointed."""
    m, n = draw(sizes)
    return m, n, draw(st.integers(0, m))


def fitting(name: str, workers: int, loops: int) -> list[int]:
    """The worker of each stage under a schedule by its name."""
    if name in V_SHAPED:
        return v_placement(2 * workers)
    return looped_placement(workers * loops if name in LOOPED else workers, workers)


@st.composite
def names(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Draw the name of a schedule, and a placement that suits it."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    return name, fitting(name, draw(st.integers(1, 4)), draw(st.integers(1, 3)))


@st.composite
def scheduled(draw: st.DrawFn) -> Scheduled:
    """Draw a named schedule with some backwards split, its micro-batches, and the worker of each stage."""
    (name, placement), m = draw(names()), draw(st.integers(1, 9))
    split = draw(st.none() | st.sets(st.sampled_from(range(len(placement)))))
    return named(name, m, placement, draw(st.integers(0, m)), split), m, placement


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[Program, ...], list[int]]:
    """Draw programs, complete or only one half, and a worker per stage."""
    programs = fill_drain(*draw(runs()))
    m, n, stop = draw(runs())
    others = [one_forward_one_backward(m, n, stop), zero_bubble(m, n, stop)]
    chosen = draw(st.sampled_from([programs, *split_forward_backward(programs), *others]))
    return chosen, draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))


@st.composite
def shuffled(draw: st.DrawFn) -> list[Program]:
    """Draw programs in which every stage has its actions in a random order, valid or not."""
    m, n, stop = draw(runs())
    return [tuple(draw(st.permutations(program))) for program in fill_drain(min(m, 3), min(n, 4), min(stop, 3))]


def steps_of(programs: tuple[Program, ...] | list[Program]) -> list[Step]:
    return [Step(j, action) for j, program in enumerate(programs) for action in program]


def needs(step: Step, present: set[Step]) -> Step | None:
    """Return the step of a different stage that must precede this one, if any."""
    return next((needed for needed in dependencies_of(step) if needed in present), None)


def executed(step_lists: Sequence[Sequence[Step]]) -> list[Step]:
    """Return the completed steps of workers that wait for requirements: a model of the links, without time."""
    present = set(chain.from_iterable(step_lists))
    queues = [list(worker_steps) for worker_steps in step_lists]
    done: list[Step] = []
    progress = True
    while progress:
        progress = False
        for queue in queues:
            while queue and needs(queue[0], present) in (None, *done):
                done.append(queue.pop(0))
                progress = True
    return done


@st.composite
def orders(draw: st.DrawFn) -> Scheduled:
    """A valid schedule in any order, its micro-batches, and the worker of each stage."""
    m, n = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    placement = draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
    return some_schedule(draw(CHOICES), m, placement, draw(st.integers(0, m))), m, placement
