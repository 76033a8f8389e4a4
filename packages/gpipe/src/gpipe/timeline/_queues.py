"""The times of the steps of a walk if a link carries one transfer at a time, and others wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ..schedule import Span, Step, Walk, requirement


@dataclass(frozen=True)
class Crossing:
    """The way of a value to a stage from the one before, and of a gradient back.

    Attributes:
        seconds: from the first byte that leaves to the last that arrives.
        busy: seconds during which other transfers wait for its link.
        link: the name of the link; None if no transfer has to wait.
    """

    seconds: float
    busy: float = 0.0
    link: str | None = None


def queued(walk: Walk, duration: Callable[[Step], float], crossings: Sequence[Crossing]) -> dict[Step, Span]:
    """When each step of ``walk`` runs, as :func:`gpipe.schedule.replay` does for links without waiting.

    What a step makes comes to its link when the step ends. Links serve in the order in which things come, and of those
    that come at once first what an earlier stage made.

    Args:
        walk: the steps of each worker, in order.
        duration: how long a step takes.
        crossings: for each stage, the way from the stage before and back.

    Raises:
        ValueError: the workers wait for each other forever.
    """
    return _Replay(walk, duration, crossings).spans()


_ENDS, _ARRIVES = 0, 1


class _Replay:
    """Events in the order of time, because who comes first to a link is known only then."""

    def __init__(self, walk: Walk, duration: Callable[[Step], float], crossings: Sequence[Crossing]) -> None:
        present = {step for steps in walk for step in steps}
        self._needs = {step: next((each for each in requirement(step) if each in present), None) for step in present}
        self._needed_by = {source: step for step, source in self._needs.items() if source is not None}
        self._duration, self._crossings = duration, crossings
        self._upcoming = [list(reversed(steps)) for steps in walk]
        self._worker = {step: worker for worker, steps in enumerate(walk) for step in steps}
        self._clocks = [0.0] * len(walk)
        self._free: dict[str, float] = {}
        self._arrived: dict[Step, float] = {}
        self._events: list[tuple[float, int, Step]] = []
        self._spans: dict[Step, Span] = {}

    def spans(self) -> dict[Step, Span]:
        for worker in range(len(self._upcoming)):
            self._go_on(worker)
        while self._events:
            time, what, step = heappop(self._events)
            if what == _ENDS:
                self._end(step, time)
            else:
                self._arrived[step] = time
            self._go_on(self._worker[step])
        if stuck := [steps[-1] for steps in self._upcoming if steps]:
            raise ValueError(f"the workers wait for each other forever, at {', '.join(map(str, stuck))}")
        return self._spans

    def _go_on(self, worker: int) -> None:
        """Begin the next step of a worker, unless it is busy or lacks its input."""
        upcoming, clock = self._upcoming[worker], self._clocks[worker]
        if not upcoming or clock < 0:
            return
        step = upcoming[-1]
        if self._needs[step] is not None and step not in self._arrived:
            return
        upcoming.pop()
        start = max(clock, self._arrived.get(step, 0.0))
        self._spans[step] = span = Span(start, start + self._duration(step), start - clock)
        self._clocks[worker] = _BUSY
        heappush(self._events, (span.end, _ENDS, step))

    def _end(self, step: Step, time: float) -> None:
        self._clocks[self._worker[step]] = time
        target = self._needed_by.get(step)
        if target is not None:
            crossing = self._crossings[max(step.stage, target.stage)]
            heappush(self._events, (self._turn(crossing, time) + crossing.seconds, _ARRIVES, target))

    def _turn(self, crossing: Crossing, time: float) -> float:
        """When the link begins with what comes to it now."""
        if crossing.link is None:
            return time
        begin = max(time, self._free.get(crossing.link, 0.0))
        self._free[crossing.link] = begin + crossing.busy
        return begin


_BUSY = -1.0
"""The clock of a worker in the middle of a step."""
