"""The replay: when the steps of a schedule run, computed from their durations. Every figure of time comes from here."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from itertools import chain
from typing import NamedTuple

from ._actions import Action, Kind, Step, Walk, deadlock

Lane = Iterable[tuple[int, tuple[Kind, int]]]
"""The steps of a worker, in order: ``(stage, (kind, microbatch))``."""

KindSeconds = Sequence[Mapping[Kind, float]]
"""For each stage, the duration of an action by its kind."""

Times = MutableSequence[float]
"""For each micro-batch the time at which something arrives; negative until that is known. In an array, since an object
for each step would be far slower."""

Arrivals = tuple[Times, Times, float, float]
"""When the inputs of an action arrive, and its outputs where they are sent; the time of that transfer; its duration."""


class Span(NamedTuple):
    """The time of a step.

    Attributes:
        start, end: of its work, in the unit of the durations.
        wait: the time that its worker was idle before.
    """

    start: float
    end: float
    wait: float


def replay(walk: Walk, seconds: KindSeconds | None = None, hops: Sequence[float] | None = None) -> dict[Step, Span]:
    """The time at which each step of ``walk`` runs, if each starts as soon as it can.

    Args:
        walk: the steps of each worker, in order. Every stage does the forward of every micro-batch, or none. If a stage
            does backwards, so do all later stages.
        seconds: for each stage, the duration of an action by its kind; by default every action takes 1.
        hops: for each stage, the time of a transfer from the stage before, and of a gradient back to it; 0 by default.

    Returns:
        The span of each step.

    Raises:
        ValueError: the workers wait for each other forever.

    >>> from gpipe.schedule import fill_drain
    >>> max(span.end for span in replay(fill_drain(8, 4).on(range(4))).values())
    22.0
    """
    steps = list(chain.from_iterable(walk))
    stages = 1 + max((step.stage for step in steps), default=-1)
    microbatches = 1 + max((step.action.microbatch for step in steps), default=-1)
    spans: dict[Step, Span] = {}
    seconds = [dict.fromkeys(Kind, 1.0)] * stages if seconds is None else seconds
    _run(walk, microbatches, seconds, [0.0] * stages if hops is None else hops, spans)
    return spans


def makespan(lanes: Sequence[Lane], microbatches: int, seconds: KindSeconds, hops: Sequence[float]) -> float:
    """The time at which the last worker finishes under :func:`replay`.

    Steps are read once and not kept, so ``lanes`` may be generators, and a thousand stages fit into memory.

    Args:
        lanes: the steps of each worker, in order.
        microbatches: the number of micro-batches.
        seconds, hops: as for :func:`replay`.

    Returns:
        The time, in the unit of the durations.

    Raises:
        ValueError: as :func:`replay`.
    """
    return _run(lanes, microbatches, seconds, hops, None)


def _run(
    lanes: Sequence[Lane],
    microbatches: int,
    seconds: KindSeconds,
    hops: Sequence[float],
    spans: dict[Step, Span] | None,
) -> float:
    """Let the workers take turns, each until it has no input."""
    arrivals, clocks = _arrivals(microbatches, seconds, hops), [0.0] * len(lanes)
    workers = [_worker(lane, arrivals, spans, clocks, number) for number, lane in enumerate(lanes)]
    before: list[tuple[int, tuple[Kind, int]]] = []
    # Any order of turns gives the same times: a step starts at the maximum of two sums, whoever computes them first.
    while blocked := [step for worker in workers if (step := next(worker, None)) is not None]:
        if blocked == before[::-1]:  # a whole round without a step
            raise deadlock(sorted(Step(j, Action(*action)) for j, action in blocked))
        before = blocked
        # Down the stages go values, up go gradients; and what a worker used last is still in the cache of the CPU.
        workers.reverse()
    return max(clocks, default=0.0)


def _arrivals(microbatches: int, seconds: KindSeconds, hops: Sequence[float]) -> list[dict[Kind, Arrivals]]:
    stages, following = len(hops), [*hops[1:], 0.0]
    unknown: list[Times] = [array("d", [-1.0]) * microbatches for _ in range(2 * stages - 1)]
    # The input of the first stage is there from the beginning, as is the loss, where the backwards begin.
    there, nowhere = array("d", [0.0]) * microbatches, array("d", [0.0]) * microbatches
    values, gradients = [there, *unknown[:stages]], [*unknown[stages:], there]
    arrivals = []
    for j, durations in enumerate(seconds):
        backwards = gradients[j], gradients[j - 1] if j else nowhere, hops[j]
        ways = {Kind.FORWARD: (values[j], values[j + 1], following[j])}
        ways |= {Kind.BACKWARD: backwards, Kind.BACKWARD_INPUT: backwards}
        # A recomputation and a backward for the weights wait for nothing, and nothing waits for them.
        arrivals.append({kind: (*ways.get(kind, (there, nowhere, 0.0)), took) for kind, took in durations.items()})
    return arrivals


def _worker(
    lane: Lane, arrivals: list[dict[Kind, Arrivals]], spans: dict[Step, Span] | None, clocks: list[float], number: int
) -> Iterator[tuple[int, tuple[Kind, int]]]:
    """Do the steps of a worker. Yields a step whose input has not arrived, again and again until it has."""
    clock = 0.0
    for j, (kind, i) in lane:  # all the time that a replay takes, for millions of steps
        inbox, outbox, hop, took = arrivals[j][kind]
        while (arrival := inbox[i]) < 0:
            yield j, (kind, i)
        start = arrival if arrival > clock else clock
        end = start + took
        outbox[i] = end + hop
        if spans is not None:
            spans[Step(j, Action(kind, i))] = Span(start, end, start - clock)
        clock = end
    clocks[number] = clock
