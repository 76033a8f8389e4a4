"""Merge the programs of several stages on one worker into one list of steps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice

from ._actions import Program, Step, Walk, requirement
from ._replay import replay


def start_ticks(programs: Sequence[Program], placement: Sequence[int]) -> dict[Step, int]:
    """The tick at which each step starts, if every action takes one tick and stage j is on worker ``placement[j]``.

    If several stages of a worker could start at the same tick, the last one starts: so micro-batches leave the pipeline
    earlier, and fewer are held.

    Args:
        programs: the program of each stage.
        placement: the worker of each stage, counted from 0.

    Returns:
        The tick of each step, counted from 0, in the order of ticks.

    Raises:
        ValueError: the programs wait for each other forever; the message names the steps.
    """
    return _Ticks(programs, placement).run()


class _Ticks:
    """A simulated run. A step is queued when its input arrives, and again if its worker turns out to be busy."""

    def __init__(self, programs: Sequence[Program], placement: Sequence[int]) -> None:
        self._present = {Step(j, action) for j, program in enumerate(programs) for action in program}
        self._placement = placement
        self._free = [0] * (max(placement, default=-1) + 1)
        self._upcoming = [iter(program) for program in programs]
        self._waiting: dict[Step, Step] = {}
        self._ready: list[tuple[int, int, Step]] = []
        self._ticks: dict[Step, int] = {}

    def run(self) -> dict[Step, int]:
        for stage in range(len(self._upcoming)):
            self._advance(stage)
        while self._ready:
            tick, _, step = heappop(self._ready)
            worker = self._placement[step.stage]
            if tick < self._free[worker]:
                self._queue(self._free[worker], step)
            else:
                self._start(tick, step, worker)
        if self._waiting:
            stuck = ", ".join(f"{step} for {needed}" for needed, step in self._waiting.items())
            raise ValueError(f"the programs wait for each other forever: {stuck}")
        return self._ticks

    def _start(self, tick: int, step: Step, worker: int) -> None:
        self._ticks[step] = tick
        self._free[worker] = tick + 1
        if step in self._waiting:
            self._queue(tick + 1, self._waiting.pop(step))
        self._advance(step.stage)

    def _advance(self, stage: int) -> None:
        for action in islice(self._upcoming[stage], 1):
            step = Step(stage, action)
            needed = next((each for each in requirement(step) if each in self._present), None)
            if needed is None or needed in self._ticks:
                self._queue(0 if needed is None else self._ticks[needed] + 1, step)
            else:
                self._waiting[needed] = step

    def _queue(self, tick: int, step: Step) -> None:
        heappush(self._ready, (tick, -step.stage, step))


def merge(programs: Sequence[Program], placement: Sequence[int]) -> Walk:
    """The steps of each worker: the programs of its stages in the order of :func:`start_ticks`.

    With all stages on one worker this is an order in which nothing ever waits.

    Args:
        programs: the program of each stage.
        placement: the worker of each stage, counted from 0.

    Returns:
        For each worker, its steps in order.

    Raises:
        ValueError: the programs wait for each other forever; the message names the steps.

    >>> from gpipe.schedule import fill_drain, halves
    >>> print(*merge(halves(fill_drain(2, 2))[0], (0, 0))[0])
    F0@0 F0@1 F1@0 F1@1
    """
    workers: list[list[Step]] = [[] for _ in range(max(placement, default=-1) + 1)]
    for step in start_ticks(programs, placement):
        workers[placement[step.stage]].append(step)
    return tuple(map(tuple, workers))


def deal(walk: Walk, placement: Sequence[int]) -> Walk:
    """The steps of ``walk`` for other workers, stage j on ``placement[j]``, in the order in which they begin in
    ``walk``.

    Raises ValueError as :func:`replay` does.
    """
    spans = replay(walk)
    workers: list[list[Step]] = [[] for _ in range(max(placement, default=-1) + 1)]
    # Steps that begin at the same time do not depend on each other, so any order among them is valid; this is that of
    # start_ticks.
    for step in sorted(spans, key=lambda step: (spans[step].start, -step.stage)):
        workers[placement[step.stage]].append(step)
    return tuple(map(tuple, workers))
