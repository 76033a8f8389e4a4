"""Merge the programs of several stages on one worker into one list of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ._actions import Program, Step, Walk
from ._replay import Span, replay, replay_programs


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
    spans = replay_programs(programs, placement)
    return {step: int(spans[step].start) for step in _in_order(spans)}


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
    return _dealt(replay_programs(programs, placement), placement)


def deal(walk: Walk, placement: Sequence[int]) -> Walk:
    """The steps of ``walk`` for other workers, stage j on ``placement[j]``, in the order in which they begin in
    ``walk``.

    Raises ValueError as :func:`replay` does.
    """
    return _dealt(replay(walk), placement)


def _dealt(spans: Mapping[Step, Span], placement: Sequence[int]) -> Walk:
    workers: list[list[Step]] = [[] for _ in range(max(placement, default=-1) + 1)]
    for step in _in_order(spans):
        workers[placement[step.stage]].append(step)
    return tuple(map(tuple, workers))


def _in_order(spans: Mapping[Step, Span]) -> list[Step]:
    # Steps that begin at the same time do not depend on each other, so any order among them is valid.
    return sorted(spans, key=lambda step: (spans[step].start, -step.stage))
