"""Generate the steps of each worker, for schedules with one stage per worker or several in loops.

Generators keep long schedules out of memory. Worker r of k has the stages r, r + k, r + 2k, and so on. Micro-batches
are generated in groups of k, so the last group may exceed the mini-batch; :func:`adapt_lane` drops the excess steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat

from ._actions import Kind
from ._replay import Lane

Steps = Iterator[tuple[int, tuple[Kind, int]]]
"""A :data:`Lane` as a generator."""

_F, _R, _B, _I, _W = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def fill_drain_steps(microbatches: int, stages: int, workers: int, worker: int) -> Steps:
    """Generate :func:`breadth_first_steps` of the stages of worker r."""
    return breadth_first_steps(microbatches, range(worker, stages, workers))


def breadth_first_steps(microbatches: int, own: Sequence[int]) -> Steps:
    """Generate all forwards of the stages ``own``, stage by stage, then all backwards in reverse order."""
    each = range(microbatches)
    forwards, backwards = (_steps(j, _F, each) for j in own), (_steps(j, _B, each[::-1]) for j in reversed(own))
    return chain.from_iterable(chain(forwards, backwards))


def steps_1f1b(microbatches: int, stages: int, workers: int, worker: int) -> Steps:
    """Alternate forwards and backwards, after just enough forwards to bridge the time until the first gradient."""
    return _in_turn(microbatches, workers, range(worker, stages, workers), ahead=stages - worker - 1)


def interleaved_steps(microbatches: int, stages: int, workers: int, worker: int) -> Steps:
    """Generate :func:`steps_1f1b` with more forwards in advance, as published."""
    return _in_turn(microbatches, workers, range(worker, stages, workers), ahead=stages + workers - 2 * (worker + 1))


def zero_bubble_steps(microbatches: int, stages: int, workers: int, worker: int) -> Steps:
    """Generate :func:`steps_1f1b` with split backwards, with weight gradients ``worker`` micro-batches later."""
    # Pairs of ints are untracked; the garbage collector would rescan a long queue of steps again and again.
    weights: deque[tuple[int, int]] = deque()
    for j, (kind, i) in steps_1f1b(microbatches, stages, workers, worker):
        if kind is _F:
            yield j, (kind, i)
            continue
        yield j, (_I, i)
        # Worker r sends its last gradient r steps before worker 0 does; the delayed weight gradients fill this time.
        weights.append((j, i))  # one queue for all stages of the worker, oldest first
        if len(weights) > worker:
            late, k = weights.popleft()
            yield late, (_W, k)
    for late, k in weights:
        yield late, (_W, k)


def _in_turn(microbatches: int, workers: int, own: range, ahead: int) -> Steps:
    """Run ``ahead`` forwards, then alternate; the stage changes after each group of k micro-batches."""
    forwards, backwards = (_in_groups(microbatches, workers, *each) for each in ((own, _F), (own[::-1], _B)))
    # The forward is first in each pair, because the last stage runs none ahead.
    turns = chain.from_iterable(zip(forwards, backwards, strict=False))
    return chain(islice(forwards, max(0, ahead)), turns, backwards)


def _in_groups(microbatches: int, workers: int, own: Iterable[int], kind: Kind) -> Steps:
    groups = (range(first, first + workers) for first in range(0, microbatches, workers))
    return chain.from_iterable(_steps(j, kind, group) for group in groups for j in own)


def _steps(stage: int, kind: Kind, microbatches: Iterable[int]) -> Steps:
    # Nested zips avoid a Python frame per step; there may be millions.
    return zip(repeat(stage), zip(repeat(kind), microbatches, strict=False), strict=False)


def adapt_lane(lane: Lane, microbatches: int, stops: tuple[int, ...], whole: frozenset[int]) -> Steps:
    """Add recomputations to the steps of a worker, and drop the steps of micro-batches that do not exist.

    Dropping steps cannot cause a deadlock, because micro-batches do not depend on each other. The backwards of stages
    in ``whole`` are not split.
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
