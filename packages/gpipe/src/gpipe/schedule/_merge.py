"""Merge the programs of several stages on one worker into one list of steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ._actions import Program, Step, Walk, deadlock, requirement


def merge(programs: Sequence[Program], placement: Sequence[int]) -> Walk:
    """The steps of each worker, if every action takes one tick and each starts as soon as it can.

    If several stages of a worker could start at the same tick, the last one starts, so that fewer micro-batches are
    held. With all stages on one worker nothing ever waits in this order.

    Args:
        programs: the program of each stage.
        placement: the worker of each stage, counted from 0.

    Returns:
        For each worker, its steps in order.

    Raises:
        ValueError: the programs wait for each other forever; the message names the steps.

    >>> from gpipe.schedule import fill_drain
    >>> print(*merge(fill_drain(2, 2), (0, 0))[0])
    F0@0 F0@1 F1@0 F1@1 B1@1 B0@1 B1@0 B0@0
    """
    upcoming = [[Step(j, action) for action in reversed(program)] for j, program in enumerate(programs)]
    # Forwards or backwards alone are a schedule too: what is in no program has been done before.
    present, done = set(chain.from_iterable(upcoming)), set[Step]()
    walk: list[list[Step]] = [[] for _ in range(max(placement, default=-1) + 1)]
    owns = [[j for j in reversed(range(len(programs))) if placement[j] == worker] for worker in range(len(walk))]

    def is_ready(step: Step) -> bool:
        sources = present.intersection(requirement(step))
        return not sources or not done.isdisjoint(sources)

    while heads := [queue[-1] for queue in upcoming if queue]:
        ready = {step.stage: step for step in heads if is_ready(step)}
        begun = [ready[next(j for j in own if j in ready)] for own in owns if not ready.keys().isdisjoint(own)]
        if not begun:
            raise deadlock(heads)
        for step in begun:  # only now: what ends at this tick is there at the next
            walk[placement[step.stage]].append(upcoming[step.stage].pop())
        done.update(begun)
    return tuple(map(tuple, walk))
