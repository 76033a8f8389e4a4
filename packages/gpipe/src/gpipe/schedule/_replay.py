"""The replay: when the steps of a schedule run, computed from their durations.

Every figure of time comes from here: in which order the stages of a worker take turns (:func:`gpipe.schedule.merge`),
simulated timelines, the choice of a schedule, and the seconds of a plan. Where nothing depends on who comes first,
``_makespan.py`` computes the end alone, by the same sums, some ten times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ._actions import Program, Step, Walk, requirement


class Span(NamedTuple):
    """The time of a step.

    Attributes:
        start, end: the begin and end of its work, in the unit of the durations.
        wait: the time that its worker was idle before.
    """

    start: float
    end: float
    wait: float


def replay(
    walk: Walk,
    duration: Callable[[Step], float] = lambda step: 1,
    transfer: Callable[[Step, Step], float] = lambda source, target: 0,
) -> dict[Step, Span]:
    """The time at which each step of ``walk`` runs, if each starts as soon as it can.

    Args:
        walk: the steps of each worker, in order.
        duration: returns the time that a step takes; 1 by default.
        transfer: returns the time between the end of a step and the arrival of its result at the step that needs it;
            0 by default.

    Returns:
        The span of each step.

    Raises:
        ValueError: the workers wait for each other forever; the message names the steps.
    """
    return _WorkerEvents([[steps] for steps in walk], duration, transfer).spans()


def replay_programs(programs: Sequence[Program], placement: Sequence[int]) -> dict[Step, Span]:
    """The same for stages without an order on their worker: of those that could start, the last one does."""
    queues: list[list[list[Step]]] = [[] for _ in range(max(placement, default=-1) + 1)]
    for j in reversed(range(len(programs))):
        queues[placement[j]].append([Step(j, action) for action in programs[j]])
    return _WorkerEvents(queues, lambda step: 1, lambda source, target: 0).spans()


class _WorkerEvents:
    """Events in the order of time, because which step of a worker is ready first is known only then.

    Args:
        queues: for each worker, the sequences of steps between which it chooses; it takes the first that is ready.
        duration: of a step.
        transfer: between the end of a step and the arrival of its result.
    """

    def __init__(
        self,
        queues: Sequence[Sequence[Sequence[Step]]],
        duration: Callable[[Step], float],
        transfer: Callable[[Step, Step], float],
    ) -> None:
        self._upcoming = [[list(reversed(queue)) for queue in own] for own in queues]
        worker_of = {step: worker for worker, own in enumerate(queues) for queue in own for step in queue}
        self._worker = worker_of
        self._needs = {
            step: next((each for each in requirement(step) if each in worker_of), None) for step in worker_of
        }
        self._needed_by = {source: step for step, source in self._needs.items() if source is not None}
        self._duration, self._transfer = duration, transfer
        self._arrived: dict[Step, float] = {}
        self._clocks = [0.0] * len(queues)
        self._busy = [False] * len(queues)
        # When something happens, and whether it is the arrival of what a step needs rather than its end.
        self._events: list[tuple[float, bool, Step]] = []
        self._spans: dict[Step, Span] = {}

    def spans(self) -> dict[Step, Span]:
        for worker in range(len(self._upcoming)):
            self._go_on(worker)
        while self._events:
            now, touched = self._events[0][0], dict[int, None]()
            # All that happens at one time is known before a worker chooses.
            while self._events and self._events[0][0] == now:
                _, arrives, step = heappop(self._events)
                if arrives:
                    self._arrived[step] = now
                else:
                    self._end(step, now)
                touched[self._worker[step]] = None
            for worker in touched:
                self._go_on(worker)
        if len(self._spans) < len(self._worker):
            heads = [queue[-1] for own in self._upcoming for queue in own if queue]
            raise ValueError(f"the workers wait for each other forever: {', '.join(map(self._waiting, heads))}")
        return self._spans

    def _waiting(self, step: Step) -> str:
        return f"{step} for {self._needs[step]}"

    def _go_on(self, worker: int) -> None:
        """Begin a step, unless the worker is busy, or no step has what it needs."""
        if self._busy[worker]:
            return
        for queue in self._upcoming[worker]:
            if queue and (self._needs[queue[-1]] is None or queue[-1] in self._arrived):
                self._begin(queue.pop(), worker)
                return

    def _begin(self, step: Step, worker: int) -> None:
        clock = self._clocks[worker]
        start = max(clock, self._arrived.get(step, 0.0))
        self._spans[step] = span = Span(start, start + self._duration(step), start - clock)
        self._clocks[worker], self._busy[worker] = span.end, True
        heappush(self._events, (span.end, False, step))

    def _end(self, step: Step, now: float) -> None:
        self._busy[self._worker[step]] = False
        target = self._needed_by.get(step)
        if target is not None:
            heappush(self._events, (now + self._transfer(step, target), True, target))
