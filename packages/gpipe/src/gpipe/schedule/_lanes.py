"""The steps of each worker under the schedules with one stage on a worker, or several in loops.

They are generators, so long schedules need not be in memory. Worker r of k has the stages r, r + k, r + 2k, and so on.
Micro-batches come in groups of k, so steps of some that do not exist are made too; :func:`adapted` leaves them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat

from ._actions import Kind
from ._replay import Lane

Steps = Iterator[tuple[int, tuple[Kind, int]]]
"""A :data:`Lane` as a generator."""

_F, _R, _B, _I, _W = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def fill_drain_steps(microbatches: int, stages: int, workers: int, worker: int) -> Steps:
    """All forwards of each stage in turn, then all backwards in reverse."""
    own, each = range(worker, stages, workers), range(microbatches)
    forwards, backwards = (_steps(j, _F, each) for j in own), (_steps(j, _B, each[::-1]) for j in reversed(own))
    return chain.from_iterable(chain(forwards, backwards))


def steps_1f1b(microbatches: int, stages: int, workers: int, worker: int) -> Steps:
    """Forward and backward in turn, after as many forwards as it takes until the first gradient is there."""
    return _in_turn(microbatches, workers, range(worker, stages, workers), ahead=stages - worker - 1)


def interleaved_steps(microbatches: int, stages: int, workers: int, worker: int) -> Steps:
    """The same with more forwards in advance, as published."""
    return _in_turn(microbatches, workers, range(worker, stages, workers), ahead=stages + workers - 2 * (worker + 1))


def zero_bubble_steps(microbatches: int, stages: int, workers: int, worker: int) -> Steps:
    """:func:`steps_1f1b` with split backwards; those for the weights come ``worker`` micro-batches later."""
    # Numbers alone: of whole steps, the garbage collector would go through all that wait again and again.
    weights: deque[tuple[int, int]] = deque()
    for j, (kind, i) in steps_1f1b(microbatches, stages, workers, worker):
        if kind is _F:
            yield j, (kind, i)
            continue
        yield j, (_I, i)
        # Worker r sends its last gradient r steps before the first worker does: weights left until then fill the time.
        weights.append((j, i))  # of all stages of the worker in one queue: the oldest first
        if len(weights) > worker:
            late, k = weights.popleft()
            yield late, (_W, k)
    for late, k in weights:
        yield late, (_W, k)


def _in_turn(microbatches: int, workers: int, own: range, ahead: int) -> Steps:
    """``ahead`` forwards, then forward and backward in turn; the stage changes after each group of k micro-batches."""
    forwards, backwards = (_in_groups(microbatches, workers, *each) for each in ((own, _F), (own[::-1], _B)))
    # A forward before each backward: the last stage, with none ahead, begins with one.
    turns = chain.from_iterable(zip(forwards, backwards, strict=False))
    return chain(islice(forwards, max(0, ahead)), turns, backwards)


def _in_groups(microbatches: int, workers: int, own: Iterable[int], kind: Kind) -> Steps:
    groups = (range(first, first + workers) for first in range(0, microbatches, workers))
    return chain.from_iterable(_steps(j, kind, group) for group in groups for j in own)


def _steps(stage: int, kind: Kind, microbatches: Iterable[int]) -> Steps:
    # Without a frame of Python for each of millions of steps.
    return zip(repeat(stage), zip(repeat(kind), microbatches, strict=False), strict=False)


def adapted(lane: Lane, microbatches: int, stops: tuple[int, ...], whole: frozenset[int]) -> Steps:
    """The steps of a worker with recomputations, and without what is not to be done.

    Steps of micro-batches that do not exist are left out, which causes no deadlock: micro-batches do not depend on each
    other. Stages in ``whole`` do not split their backward.
    """
    for j, (kind, i) in lane:
        if i >= microbatches or (kind is _W and j in whole):
            continue
        if kind is _F or kind is _W:
            yield j, (kind, i)
            continue
        if i < stops[j]:
            yield j, (_R, i)
        yield j, (_B if j in whole else kind, i)
