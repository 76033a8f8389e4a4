"""The makespan alone: the time that :func:`gpipe.schedule.replay` finds, computed faster and in less memory.

The order of time is not needed if every worker has its order, and transfers never wait for each other: each start is
the maximum of the same two sums as there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ._actions import Kind

Lane = Iterable[tuple[int, tuple[Kind, int]]]
"""The steps of a worker, in order: ``(stage, (kind, microbatch))``, where the kind is a member of :class:`Kind`."""

_FORWARD, _RECOMPUTE, _WEIGHT = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT


def makespan(
    lanes: Sequence[Lane],
    microbatches: int,
    seconds: Sequence[Mapping[Kind, float]],
    hops: Sequence[float],
) -> float:
    """The time at which the last worker finishes, if each does its steps in order and starts each as soon as it can.

    Steps are read once and not kept, so ``lanes`` may be generators.

    Args:
        lanes: the steps of each worker. Every stage does the forward of every micro-batch. If a stage does backwards,
            so do all later stages.
        microbatches: the number of micro-batches.
        seconds: for each stage, the duration of an action by its kind.
        hops: for each stage, the time of a transfer from the stage before, and of a gradient back to it.

    Returns:
        The time, in the unit of ``seconds``.

    Raises:
        ValueError: the workers wait for each other forever.

    >>> from gpipe.schedule import fill_drain
    >>> seconds = [{Kind.FORWARD: 1, Kind.BACKWARD: 2}] * 4
    >>> makespan(fill_drain(8, 4).on(range(4)), 8, seconds, [0] * 4)
    33.0
    """
    return _Arrivals(microbatches, seconds, hops).after(lanes)


class _Arrivals:
    """The times at which values and gradients arrive at stages, in arrays: objects for steps would be far slower."""

    def __init__(self, microbatches: int, seconds: Sequence[Mapping[Kind, float]], hops: Sequence[float]) -> None:
        stages = len(seconds)
        self._seconds = seconds
        self._hops = [*hops, 0.0]
        # By stage and micro-batch; negative until known. The last row takes what leaves the pipeline and is never
        # read: outputs have index `stages`, gradients of the input have index -1.
        self._values = [array("d", [-1.0]) * microbatches for _ in range(stages + 1)]
        self._gradients = [array("d", [-1.0]) * microbatches for _ in range(stages + 1)]
        self._values[0] = array("d", [0.0]) * microbatches
        self._gradients[stages - 1] = array("d", [0.0]) * microbatches
        # For each stage, the micro-batch whose value (or gradient) its worker waits for; -1 if it does not wait.
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
            raise ValueError(f"the workers wait for each other forever: {', '.join(stuck)}")
        return max(clocks, default=0.0)

    def _walk(self, lane: Lane, worker: int, clocks: list[float]) -> Iterator[None]:
        """Do the steps of a worker. Yields where a step has to wait; the caller resumes when the input has arrived."""
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

    def _stuck(self) -> list[str]:
        """The steps whose inputs never arrive."""
        waits = (("F", -1, self._awaited_values), ("B", 1, self._awaited_gradients))
        return [f"{letter}{i}@{j} for {letter}{i}@{j + needed}" for letter, needed, awaited in waits
                for j, i in enumerate(awaited) if i >= 0]  # fmt: skip
