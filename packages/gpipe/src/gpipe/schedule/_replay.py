"""Replay a schedule: compute when each step runs from the durations of steps. All predicted times come from here."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from itertools import chain
from typing import NamedTuple

from ._actions import MOVES, TRANSFERS, TRIPS, Action, Kind, Step, WorkerSteps, deadlock

Lane = Iterable[tuple[int, tuple[Kind, int]]]
"""The steps of a worker, in order: ``(stage, (kind, microbatch))``."""

KindSeconds = Sequence[Mapping[Kind, float]]
"""The durations of the actions of each stage, by kind."""

Times = MutableSequence[float]
"""The arrival time of a value or gradient of each micro-batch; negative until it is known.

It is an array, because one object per step would be far slower.
"""

Arrivals = tuple[Times, Times, float, float]
"""The times when an action's inputs arrive, and when its outputs reach their receiver, the transfer time, and the
duration of the action."""


class Span(NamedTuple):
    """The time span of a step, in the unit of the durations.

    Attributes:
        start, end: the times when its work starts and ends.
        wait: the idle time of its worker just before ``start``.
    """

    start: float
    end: float
    wait: float


def steps_of_lanes(lanes: Iterable[Lane]) -> WorkerSteps:
    """Return the steps of the workers with these lanes."""
    return tuple(tuple(Step(j, Action(*action)) for j, action in lane) for lane in lanes)


def replay(
    worker_steps: WorkerSteps, seconds: KindSeconds | None = None, hops: Sequence[float] | None = None
) -> dict[Step, Span]:
    """Compute when each step of ``worker_steps`` runs, if every step starts as soon as it can.

    Args:
        worker_steps: the steps of each worker, in order. Either every stage runs the forward of every
            micro-batch, or no stage runs any. If a stage runs backwards, so do all later stages.
        seconds: the durations of the actions of each stage, by kind; 1 each by default.
        hops: the transfer time from the previous stage to each stage, and of a gradient back to it; 0 by default.

    Returns:
        The time span of each step.

    Raises:
        ValueError: the workers wait for each other forever.

    >>> from gpipe.schedule import fill_drain
    >>> max(span.end for span in replay(fill_drain(8, 4).on(range(4))).values())
    22.0
    """
    steps = list(chain.from_iterable(worker_steps))
    stages = 1 + max((step.stage for step in steps), default=-1)
    microbatches = 1 + max((step.action.microbatch for step in steps if step.action.kind not in MOVES), default=-1)
    spans: dict[Step, Span] = {}
    seconds = [dict.fromkeys(Kind, 1.0)] * stages if seconds is None else seconds
    _run(worker_steps, microbatches, seconds, [0.0] * stages if hops is None else hops, spans)
    return spans


def makespan(lanes: Sequence[Lane], microbatches: int, seconds: KindSeconds, hops: Sequence[float]) -> float:
    """Compute when the last worker finishes under :func:`replay`.

    Steps are read once and not stored, so ``lanes`` may be generators, and a thousand stages fit into memory.

    Args:
        lanes: the steps of each worker, in order.
        microbatches: the number of micro-batches.
        seconds, hops: as for :func:`replay`.

    Returns:
        The time, in the unit of the durations.

    Raises:
        ValueError: as for :func:`replay`.
    """
    return _run(lanes, microbatches, seconds, hops, None)


def _run(
    lanes: Sequence[Lane],
    microbatches: int,
    seconds: KindSeconds,
    hops: Sequence[float],
    spans: dict[Step, Span] | None,
) -> float:
    """Advance the workers round-robin, each until an input is missing, and return the end of the last step."""
    arrivals, clocks = _arrivals(microbatches, seconds, hops), [0.0] * len(lanes)
    workers = [_worker(lane, arrivals, spans, clocks, number) for number, lane in enumerate(lanes)]
    before: list[tuple[int, tuple[Kind, int]]] = []
    # The result does not depend on the order of workers: a step starts at the maximum of two sums.
    while blocked := [step for worker in workers if (step := next(worker, None)) is not None]:
        if blocked == before[::-1]:  # a whole round without a step
            raise deadlock(sorted(Step(j, Action(*action)) for j, action in blocked))
        before = blocked
        # Alternate the direction: values flow down the stages, gradients up. It also keeps the CPU cache warm.
        workers.reverse()
    return max(clocks, default=0.0)


def _arrivals(microbatches: int, seconds: KindSeconds, hops: Sequence[float]) -> list[dict[Kind, Arrivals]]:
    stages, following = len(hops), [*hops[1:], 0.0]
    unknown: list[Times] = [array("d", [-1.0]) * microbatches for _ in range(2 * stages - 1)]
    # The input of the first stage, and the gradient of the loss, are available from the start.
    there, nowhere = array("d", [0.0]) * microbatches, array("d", [0.0]) * microbatches
    values, gradients = [there, *unknown[:stages]], [*unknown[stages:], there]
    arrivals = []
    for j, durations in enumerate(seconds):
        backwards = gradients[j], gradients[j - 1] if j else nowhere, hops[j]
        ways = {Kind.FORWARD: (values[j], values[j + 1], following[j])}
        ways |= {Kind.BACKWARD: backwards, Kind.BACKWARD_INPUT: backwards}
        # Recomputations and weight gradients wait for no other stage, and no other stage waits for them.
        arrivals.append({kind: (*ways.get(kind, (there, nowhere, 0.0)), took) for kind, took in durations.items()})
    return arrivals


def _worker(
    lane: Lane, arrivals: list[dict[Kind, Arrivals]], spans: dict[Step, Span] | None, clocks: list[float], number: int
) -> Iterator[tuple[int, tuple[Kind, int]]]:
    """Run the steps of a worker. While the input of a step is missing, yield the step."""
    clock, link = 0.0, _HostLink()
    for j, (kind, i) in lane:  # the hot loop of a replay, with up to millions of steps
        if kind in _TRANSFERS:
            start, end = link.move(j, kind, i, clock, arrivals[j][kind][-1])
            if spans is not None:
                spans[Step(j, Action(kind, i))] = Span(start, end, 0.0)
            continue
        inbox, outbox, hop, took = arrivals[j][kind]
        while (arrival := inbox[i]) < 0:
            yield j, (kind, i)
        start = arrival if arrival > clock else clock
        if link.is_used:
            start = link.compute_start(j, kind, i, start)
        end = start + took
        outbox[i] = end + hop
        if spans is not None:
            spans[Step(j, Action(kind, i))] = Span(start, end, start - clock)
        clock = end
    clocks[number] = max(clock, link.outward)


_TRANSFERS = frozenset(TRANSFERS)


class _HostLink:
    """The two directions of the link between a device and the host.

    Parameters and saved tensors share it.

    Attributes:
        is_used: whether anything has moved.
        inward, outward: when each direction is free.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.inward = self.outward = 0.0
        # When the parameters of each stage have arrived, and the saved tensors of each cell.
        self._loaded: dict[int, float] = {}
        self._arrived: dict[tuple[int, int], float] = {}
        self._left: dict[tuple[int, int], float] = {}
        # The last action of each stage. Only after a backward does an unload copy gradients.
        self._last: dict[int, Kind] = {}
        # When the memory of cells that have left is free, and whether the worker waits for it.
        self._leaving = self._freed = 0.0

    def compute_start(self, stage: int, kind: Kind, i: int, start: float) -> float:
        """Return the start of a computation that could start at ``start`` if nothing had to arrive."""
        self._last[stage] = kind
        return max(start, self._loaded.get(stage, 0.0), self._arrived.get((stage, i), 0.0), self._freed)

    def move(self, stage: int, kind: Kind, i: int, clock: float, seconds: float) -> tuple[float, float]:
        """Return the start and end of a transfer that is queued at the time ``clock``."""
        self.is_used = True
        if kind == Kind.UNLOAD and self._last.get(stage) not in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            return clock, clock
        if kind in TRIPS:
            self._freed = self._leaving
            clock = max(clock, self._freed, self._left.get((stage, i), 0.0))
        if kind in (Kind.LOAD, Kind.PREFETCH):
            start = max(clock, self.inward)
            self.inward = end = start + seconds
        else:
            start = max(clock, self.outward)
            self.outward = end = start + seconds
        if kind == Kind.LOAD:
            self._loaded[stage] = end
        elif kind == Kind.PREFETCH:
            self._arrived[stage, i] = end
        elif kind == Kind.OFFLOAD:
            self._left[stage, i] = self._leaving = end
        return start, end
