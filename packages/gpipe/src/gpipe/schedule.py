"""What happens on which stage, and in which order, as plain data.

A **program** lists the actions of one stage in order. Nothing here runs anything: programs can be printed, compared,
and proved free of deadlocks in milliseconds; :mod:`gpipe.pipeline` walks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice
from typing import Literal, NamedTuple

Kind = Literal["forward", "recompute", "backward"]


class Action(NamedTuple):
    """One thing a stage does to one micro-batch."""

    kind: Kind
    microbatch: int


class Step(NamedTuple):
    """An action together with the stage that does it."""

    stage: int
    action: Action


Program = tuple[Action, ...]


def clock_cycles(microbatches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """The cells (micro-batch i, stage j) that may run at the same clock tick: those with i + j = tick.

    There are ``microbatches + stages - 1`` ticks (GPipe, section 2.3).

    >>> list(clock_cycles(3, 2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    """
    for tick in range(microbatches + stages - 1 if microbatches and stages else 0):
        first = max(tick - microbatches + 1, 0)
        yield [(tick - j, j) for j in range(first, min(tick + 1, stages))]


@lru_cache(maxsize=64)
def fill_drain(microbatches: int, stages: int, checkpoint_stop: int = 0) -> tuple[Program, ...]:
    """All forwards, then all backwards in reverse; holds every micro-batch at once.

    Micro-batches below ``checkpoint_stop`` are checkpointed. Their graph is rebuilt just before their backward, in
    the time a stage would otherwise wait for the gradient::

        stage 0  F0 F1 F2 .  .  .  R2 B2 R1 B1 R0 B0
        stage 1  .  F0 F1 F2 R2 B2 R1 B1 R0 B0 .  .

    >>> print(*fill_drain(2, 1, checkpoint_stop=1)[0], sep="\\n")
    Action(kind='forward', microbatch=0)
    Action(kind='forward', microbatch=1)
    Action(kind='backward', microbatch=1)
    Action(kind='recompute', microbatch=0)
    Action(kind='backward', microbatch=0)
    """
    forwards = [Action("forward", i) for i in range(microbatches)]
    backwards = [
        Action(kind, i)
        for i in reversed(range(microbatches))
        for kind in (("recompute", "backward") if i < checkpoint_stop else ("backward",))
    ]
    return tuple((*forwards, *backwards) for _ in range(stages))


def halves(programs: Sequence[Program]) -> tuple[tuple[Program, ...], tuple[Program, ...]]:
    """Cut programs whose forwards all come first where the caller gets the outputs: (forwards, the rest)."""
    forwards = tuple(tuple(a for a in program if a.kind == "forward") for program in programs)
    return forwards, tuple(program[len(head) :] for program, head in zip(programs, forwards, strict=True))


def requirement(step: Step) -> Step | None:
    """The step of another stage whose result this one consumes, if there is such a stage."""
    stage, (kind, microbatch) = step
    if kind == "forward":
        return Step(stage - 1, Action("forward", microbatch))
    if kind == "backward":
        return Step(stage + 1, Action("backward", microbatch))
    return None


def start_ticks(programs: Sequence[Program], placement: Sequence[int]) -> dict[Step, int]:
    """When each step starts if every action takes one tick, and stage j runs on worker ``placement[j]``; in that order.

    Of two stages of a worker that could start at the same tick the lower one goes first.

    Raises ValueError if the programs wait for each other for ever, naming where.
    """
    present = {Step(j, action) for j, program in enumerate(programs) for action in program}
    free = [0] * (max(placement, default=-1) + 1)
    ticks: dict[Step, int] = {}
    upcoming = [iter(program) for program in programs]
    waiting: dict[Step, list[Step]] = {}
    ready: list[tuple[int, Step]] = []

    def consider(step: Step) -> None:
        needed = requirement(step)
        if needed not in present:
            heappush(ready, (0, step))
        elif needed in ticks:
            heappush(ready, (ticks[needed] + 1, step))
        else:
            waiting.setdefault(needed, []).append(step)

    def advance(stage: int) -> None:
        for action in islice(upcoming[stage], 1):
            consider(Step(stage, action))

    for stage in range(len(programs)):
        advance(stage)
    while ready:
        tick, step = heappop(ready)
        worker = placement[step.stage]
        if tick < free[worker]:
            heappush(ready, (free[worker], step))
            continue
        ticks[step] = tick
        free[worker] = tick + 1
        for dependent in waiting.pop(step, ()):
            heappush(ready, (tick + 1, dependent))
        advance(step.stage)
    if waiting:
        stuck = (f"stage {j}: {kind} of micro-batch {i}" for steps in waiting.values() for j, (kind, i) in steps)
        raise ValueError(f"the programs wait for each other for ever: {'; '.join(sorted(stuck))}")
    return ticks


def merge(programs: Sequence[Program], placement: Sequence[int]) -> tuple[tuple[Step, ...], ...]:
    """The steps of each worker: the programs of its stages in the order of :func:`start_ticks`.

    With all stages on one worker this is an order in which nothing ever waits.

    >>> [f"{kind[0]}{i}@{j}" for j, (kind, i) in merge(halves(fill_drain(2, 2))[0], (0, 0))[0]]
    ['f0@0', 'f0@1', 'f1@0', 'f1@1']
    """
    workers: list[list[Step]] = [[] for _ in range(max(placement, default=-1) + 1)]
    for step in start_ticks(programs, placement):
        workers[placement[step.stage]].append(step)
    return tuple(map(tuple, workers))
