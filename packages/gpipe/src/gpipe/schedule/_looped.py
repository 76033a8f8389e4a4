"""Schedules with several stages for each worker, stage j on worker j mod k."""

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
    """The worker of each stage if stage j is on worker j mod k.

    Args:
        stages: n, the number of stages.
        workers: k, the number of workers.

    Returns:
        For each stage, the number of its worker.

    >>> looped_placement(6, 2)
    [0, 1, 0, 1, 0, 1]
    """
    return [j % workers for j in range(stages)]


def interleaved(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0) -> Schedule:
    """1F1B with v stages on each worker, stage j on worker j mod k: the bubble is v times smaller.

    Groups of k micro-batches go through the first stage of every worker, then through the second stages, and so on.
    With v = n / k stages on each worker, the bubble is that of k stages divided by v, if m is divisible by k. Worker r
    holds at most 2(k − r − 1) + (v − 1)k + 1 micro-batches of one stage.

    Source: Megatron-LM (Narayanan et al., arXiv 2104.04473, section 2.2).

    Args:
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages.
        workers: k, the number of workers.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.

    Returns:
        A program for each stage.

    Raises:
        ValueError: the number of stages is not divisible by that of workers, or ``checkpoint_stop`` has another length.
    """
    return schedule_by_worker(interleaved_lanes(microbatches, stages, workers, checkpoint_stop), stages)


def interleaved_lanes(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops) -> list[Lane]:
    owns = enumerate(_dealt(stages, workers))
    lanes = [_in_turn(microbatches, workers, own, stages + workers - 2 * (r + 1)) for r, own in owns]
    return adapted(lanes, microbatches, stages, checkpoint_stop)


def looped_bfs(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0) -> Schedule:
    """Fill-drain with v stages on each worker, stage j on worker j mod k: the bubble is v times smaller.

    Breadth first: a worker computes all micro-batches on one of its stages before it begins the next stage, and the
    backwards in reverse. So the forwards of a stage are consecutive, and so are its backwards: replicas can gather its
    parameters, and reduce its gradients, once each. With v = n / k stages on each worker and m ≥ k, a worker is idle
    for (k − 1)(f + b), where f and b are the times of a forward and a backward of one stage: as under fill-drain with k
    stages, but these stages are v times smaller. A worker holds v·m micro-batches of one stage, as much as under
    fill-drain.

    Source: Breadth-First Pipeline Parallelism (Lamy-Poirier, arXiv 2211.05953)::

        F0@0 F1@0 F0@2 F1@2 .    .    B1@2 B0@2 B1@0 B0@0
        .    F0@1 F1@1 F0@3 F1@3 B1@3 B0@3 B1@1 B0@1 .

    Args:
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages.
        workers: k, the number of workers.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.

    Returns:
        A program for each stage.

    Raises:
        ValueError: the number of stages is not divisible by that of workers, or ``checkpoint_stop`` has another length.
    """
    return schedule_by_worker(looped_bfs_lanes(microbatches, stages, workers, checkpoint_stop), stages)


def looped_bfs_lanes(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops) -> list[Lane]:
    lanes = [_breadth_first(microbatches, own) for own in _dealt(stages, workers)]
    return adapted(lanes, microbatches, stages, checkpoint_stop)


def interleaved_zero_bubble(
    microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None
) -> Schedule:
    """Zero bubble with v stages on each worker, stage j on worker j mod k: the bubble is v times smaller.

    :func:`interleaved` with split backwards. Worker r delays the weights of r micro-batches, and computes k − r − 1
    fewer forwards in advance. If m is divisible by k, a worker is idle for (k − 1)(f + i − w), where f, i and w are the
    times of a forward and both parts of the backward of one stage, with w ≤ i ≤ f; if no backward is split, for (k −
    1)(f + b), as under interleaved. It holds at most n micro-batches of one stage, as much as k micro-batches of all of
    its v = n / k stages. With one stage on each worker it is :func:`gpipe.schedule.zero_bubble`.

    Source: ZB-H1 (Qi et al., arXiv 2401.10241) on the loops of Megatron-LM (Narayanan et al., arXiv 2104.04473).

    Args:
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages.
        workers: k, the number of workers.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: the stages whose backward is split, by default all.

    Returns:
        A program for each stage.

    Raises:
        ValueError: the number of stages is not divisible by that of workers, or ``checkpoint_stop`` has another length.
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
    """``ahead`` forwards, then forward and backward in turn; the stage changes after each group of k micro-batches."""
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
    """The same steps with split backwards; those for the weights come ``late`` micro-batches later."""
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
