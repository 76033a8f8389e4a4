"""When the last step of a walk ends: one figure of a replay, several times as fast and in less memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ._actions import Action, Kind, Step

Lane = Iterable[tuple[int, tuple[Kind, int]]]
"""The steps of a worker, in order, as pairs like those of :class:`Step` and :class:`Action`; kinds are members."""

_FORWARD, _RECOMPUTE, _WEIGHT = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT


def makespan(
    lanes: Sequence[Lane],
    microbatches: int,
    seconds: Sequence[Mapping[Kind, float]],
    hops: Sequence[float],
) -> float:
    """When the last worker is through, if every worker does its steps in order, each as soon as it can.

    Steps are read once and not kept, so that ``lanes`` may be made on the way.

    Args:
        lanes: the steps of each worker. A stage has a forward of each micro-batch; if it has backwards, so have the
            stages after it.
        microbatches: how many there are.
        seconds: for each stage, what an action takes by its kind.
        hops: for each stage, how long a value takes to it from the stage before, and a gradient back.

    Raises ValueError if the workers wait for each other for ever.

    >>> from gpipe.schedule import fill_drain
    >>> seconds = [{Kind.FORWARD: 1, Kind.BACKWARD: 2}] * 4
    >>> makespan(fill_drain(8, 4).on(range(4)), 8, seconds, [0] * 4)
    33.0
    """
    return _Arrivals(microbatches, seconds, hops).after(lanes)


class _Arrivals:
    """When values and gradients arrive at the stages: lists of floats, because objects would take all the time."""

    def __init__(self, microbatches: int, seconds: Sequence[Mapping[Kind, float]], hops: Sequence[float]) -> None:
        stages = len(seconds)
        self._seconds = seconds
        self._hops = [*hops, 0.0]
        # By stage and micro-batch; negative until it is known. What leaves the pipeline goes to a row that nobody
        # reads, which for gradients is that at -1.
        self._values = [array("d", [-1.0]) * microbatches for _ in range(stages + 1)]
        self._gradients = [array("d", [-1.0]) * microbatches for _ in range(stages + 1)]
        self._values[0] = array("d", [0.0]) * microbatches
        self._gradients[stages - 1] = array("d", [0.0]) * microbatches
        # For each stage, the micro-batch whose value, or gradient, its worker waits for; -1 if for none.
        self._awaited_values, self._awaited_gradients = [-1] * (stages + 1), [-1] * (stages + 1)
        self._workers = [0] * (stages + 1)
        self._runnable: list[int] = []

    def after(self, lanes: Sequence[Lane]) -> float:
        clocks = [0.0] * len(lanes)
        walks = [self._walk(lane, worker, clocks) for worker, lane in enumerate(lanes)]
        self._runnable += range(len(lanes))
        while self._runnable:
            next(walks[self._runnable.pop()], None)
        if stuck := self._stuck():
            raise ValueError(f"the workers wait for each other for ever, at {', '.join(map(str, stuck))}")
        return max(clocks, default=0.0)

    def _walk(self, lane: Lane, worker: int, clocks: list[float]) -> Iterator[None]:
        """Do the steps of a worker; stops where one has to wait, and is to go on when what it needs is there."""
        for_values, for_gradients = self._awaited_values, self._awaited_gradients
        workers, runnable = self._workers, self._runnable
        clock, here = 0.0, -1
        for j, (kind, i) in lane:
            if j != here:
                here, workers[j] = j, worker
                seconds = self._seconds[j]
                values, onwards = self._values[j : j + 2]
                gradients, backwards = self._gradients[j], self._gradients[j - 1]
                hop, next_hop = self._hops[j : j + 2]
            if kind is _FORWARD:
                if values[i] < 0:
                    for_values[j] = i
                    yield
                arrival = values[i]
                clock = (arrival if arrival > clock else clock) + seconds[kind]
                onwards[i] = clock + next_hop
                if for_values[j + 1] == i:
                    for_values[j + 1] = -1
                    runnable.append(workers[j + 1])
            elif kind is _RECOMPUTE or kind is _WEIGHT:
                clock += seconds[kind]
            else:
                if gradients[i] < 0:
                    for_gradients[j] = i
                    yield
                arrival = gradients[i]
                clock = (arrival if arrival > clock else clock) + seconds[kind]
                backwards[i] = clock + hop
                if for_gradients[j - 1] == i:
                    for_gradients[j - 1] = -1
                    runnable.append(workers[j - 1])
        clocks[worker] = clock

    def _stuck(self) -> list[Step]:
        """What workers wait for that never comes."""
        waits = ((Kind.FORWARD, self._awaited_values), (Kind.BACKWARD, self._awaited_gradients))
        return [Step(j, Action(kind, i)) for kind, awaited in waits for j, i in enumerate(awaited) if i >= 0]
