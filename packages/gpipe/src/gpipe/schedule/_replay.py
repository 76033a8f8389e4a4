"""When each step of a walk runs, given how long steps take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ._actions import Step, Walk, requirement


class Span(NamedTuple):
    """When a step ran.

    Attributes:
        start, end: of its work, in the unit of the durations.
        wait: how long its worker stood still before.
    """

    start: float
    end: float
    wait: float


def replay(
    walk: Walk,
    duration: Callable[[Step], float] = lambda step: 1,
    transfer: Callable[[Step, Step], float] = lambda source, target: 0,
) -> dict[Step, Span]:
    """When each step of ``walk`` runs.

    Args:
        walk: the steps of each worker, in order.
        duration: how long a step takes.
        transfer: how long the result of a step takes to arrive at the step that needs it.

    Returns:
        When each step begins and ends, and how long its worker waited before.

    Raises:
        ValueError: the workers wait for each other forever; names where.
    """
    present = {step for steps in walk for step in steps}
    spans: dict[Step, Span] = {}
    waiting: dict[Step, int] = {}
    clocks = [0.0] * len(walk)
    upcoming = [iter(steps) for steps in walk]
    blocked: list[Step | None] = [None] * len(walk)

    def go_on(worker: int) -> Iterator[int]:
        """Run the steps of a worker until one has to wait; the workers that waited for one of these."""
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
