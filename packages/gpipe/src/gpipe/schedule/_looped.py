"""Schedules of stages in loops over the workers, stage j on worker j mod k."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from ._actions import Kind
from ._lanes import Steps, adapted, schedule_by_worker
from ._makespan import Lane
from ._modes import Stops
from ._schedule import Schedule


def looped_placement(stages: int, workers: int) -> list[int]:
    """The worker of each stage where these take the workers in turn.

    Args:
        stages: n, how many there are.
        workers: k, how many there are.

    Returns:
        For each stage, the number of its worker.

    >>> looped_placement(6, 2)
    [0, 1, 0, 1, 0, 1]
    """
    return [j % workers for j in range(stages)]


def interleaved(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0) -> Schedule:
    """1F1B with several stages a worker, stage j on worker j mod k: a bubble as many times smaller.

    A group of k micro-batches goes through the first stage of every worker, then through the second ones, and so on.
    With v = n / k stages a worker the bubble is that of k stages divided by v, for m divisible by k. Each worker holds
    at most 2(k − r − 1) + (v − 1)k + 1 micro-batches of one stage, r being its number.

    Source: Megatron-LM (Narayanan et al., arXiv 2104.04473, section 2.2).

    Args:
        microbatches: m, how many there are.
        stages: n, how many there are.
        workers: k, how many there are.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.

    Returns:
        A program for each stage.

    Raises:
        ValueError: the stages do not go evenly on the workers, or ``checkpoint_stop`` has another length.
    """
    return schedule_by_worker(interleaved_lanes(microbatches, stages, workers, checkpoint_stop), stages)


def interleaved_lanes(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops) -> list[Lane]:
    owns = enumerate(_dealt(stages, workers))
    lanes = [_in_turn(microbatches, workers, own, stages + workers - 2 * (r + 1)) for r, own in owns]
    return adapted(lanes, microbatches, stages, checkpoint_stop)


def looped_bfs(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0) -> Schedule:
    """Fill-drain with several stages a worker, stage j on worker j mod k: a bubble as many times smaller.

    Breadth first: a worker takes all micro-batches through one of its stages before it begins the next one, and back in
    reverse. So a stage is busy in one piece each way: what is shared out between replicas, parameters or the sums of
    gradients, is sent once. With v = n / k stages a worker and m ≥ k, a worker stands idle for (k − 1)(f + b), a stage
    taking f for a forward and b for a backward: as under fill-drain with k stages, but of stages v times as small. A
    worker holds v·m micro-batches of one stage, as much as under fill-drain.

    Source: Breadth-First Pipeline Parallelism (Lamy-Poirier, arXiv 2211.05953)::

        F0@0 F1@0 F0@2 F1@2 .    .    B1@2 B0@2 B1@0 B0@0
        .    F0@1 F1@1 F0@3 F1@3 B1@3 B0@3 B1@1 B0@1 .

    Args:
        microbatches: m, how many there are.
        stages: n, how many there are.
        workers: k, how many there are.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.

    Returns:
        A program for each stage.

    Raises:
        ValueError: the stages do not go evenly on the workers, or ``checkpoint_stop`` has another length.
    """
    return schedule_by_worker(looped_bfs_lanes(microbatches, stages, workers, checkpoint_stop), stages)


def looped_bfs_lanes(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops) -> list[Lane]:
    lanes = [_breadth_first(microbatches, own) for own in _dealt(stages, workers)]
    return adapted(lanes, microbatches, stages, checkpoint_stop)


def interleaved_zero_bubble(
    microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None
) -> Schedule:
    """Zero bubble with several stages a worker, stage j on worker j mod k: a bubble as many times smaller.

    :func:`interleaved` with the backward split. Worker r puts off the weights of r micro-batches, and runs k − r − 1
    fewer forwards ahead. For m divisible by k it stands idle for (k − 1)(f + i − w), with the forward f and both parts
    of the backward, i and w, of one stage and w ≤ i ≤ f; where no backward is split, for (k − 1)(f + b), as interleaved
    does. It holds at most n micro-batches of one stage, as much as k of the v = n / k stages that it has. With a stage
    a worker it is :func:`gpipe.schedule.zero_bubble`.

    Source: ZB-H1 (Qi et al., arXiv 2401.10241) on the loops of Megatron-LM (Narayanan et al., arXiv 2104.04473).

    Args:
        microbatches: m, how many there are.
        stages: n, how many there are.
        workers: k, how many there are.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: the stages whose backward is split, by default all.

    Returns:
        A program for each stage.

    Raises:
        ValueError: the stages do not go evenly on the workers, or ``checkpoint_stop`` has another length.
    """
    lanes = interleaved_zero_bubble_lanes(microbatches, stages, workers, checkpoint_stop, split)
    return schedule_by_worker(lanes, stages)


def interleaved_zero_bubble_lanes(
    microbatches: int, stages: int, workers: int, checkpoint_stop: Stops, split: Collection[int] | None = None
) -> list[Lane]:
    owns = enumerate(_dealt(stages, workers))
    lanes = [_split(_in_turn(microbatches, workers, own, stages - (r + 1)), late=r) for r, own in owns]
    return adapted(lanes, microbatches, stages, checkpoint_stop, split)


def _dealt(stages: int, workers: int) -> list[range]:
    """The stages of each worker."""
    if workers < 1 or stages % workers:
        raise ValueError(
            f"loops deal the same number of stages to every worker: {stages} stages do not go evenly on "
            f"{workers} workers; choose a balance with a multiple of {workers} partitions"
        )
    return [range(r, stages, workers) for r in range(workers)]


def _in_turn(microbatches: int, workers: int, own: range, ahead: int) -> Steps:
    """So many forwards ahead, then forward and backward in turn, by whole groups of a micro-batch a worker."""
    forwards = _in_groups(microbatches, workers, own)
    for j, i in islice(forwards, max(0, ahead)):
        yield j, (Kind.FORWARD, i)
    for j, i in _in_groups(microbatches, workers, own[::-1]):
        for h, g in islice(forwards, 1):
            yield h, (Kind.FORWARD, g)
        yield j, (Kind.BACKWARD, i)


def _in_groups(microbatches: int, workers: int, own: Iterable[int]) -> Iterator[tuple[int, int]]:
    for first in range(0, microbatches, workers):
        for j in own:
            for i in range(first, first + workers):
                yield j, i


def _breadth_first(microbatches: int, own: range) -> Steps:
    for j in own:
        for i in range(microbatches):
            yield j, (Kind.FORWARD, i)
    for j in reversed(own):
        for i in reversed(range(microbatches)):
            yield j, (Kind.BACKWARD, i)


def _split(lane: Lane, late: int) -> Steps:
    """The same with backwards in two parts, those for the weights ``late`` micro-batches behind."""
    weights: deque[tuple[int, tuple[Kind, int]]] = deque()
    for j, (kind, i) in lane:
        if kind is not Kind.BACKWARD:
            yield j, (kind, i)
            continue
        yield j, (Kind.BACKWARD_INPUT, i)
        weights.append((j, (Kind.BACKWARD_WEIGHT, i)))
        if len(weights) > late:
            yield weights.popleft()
    yield from weights
