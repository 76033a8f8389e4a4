"""The times at which the steps of a walk run, computed from their durations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ._actions import Step, Walk, requirement


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
    present = {step for steps in walk for step in steps}
    spans: dict[Step, Span] = {}
    waiting: dict[Step, int] = {}
    clocks = [0.0] * len(walk)
    upcoming = [iter(steps) for steps in walk]
    blocked: list[Step | None] = [None] * len(walk)

    def go_on(worker: int) -> Iterator[int]:
        """Run the steps of a worker until one has to wait. Yields the workers that waited for one of these."""
        while (step := blocked[worker] or next(upcoming[worker], None)) is not None:
            needed = next((each for each in requirement(step) if each in present), None)
            if needed is not None and needed not in spans:
                blocked[worker], waiting[needed] = step, worker
                return
            blocked[worker] = None
            arrival = 0.0 if needed is None else spans[needed].end + transfer(needed, step)
            start = max(clocks[worker], arrival)
            spans[step] = Span(start, start + duration(step), start - clocks[worker])
            clocks[worker] = spans[step].end
            if step in waiting:
                yield waiting.pop(step)

    runnable = list(range(len(walk)))
    while runnable:
        runnable.extend(go_on(runnable.pop()))
    if waiting:
        stuck = ", ".join(f"{blocked[worker]} for {needed}" for needed, worker in waiting.items())
        raise ValueError(f"the workers wait for each other forever: {stuck}")
    return spans
