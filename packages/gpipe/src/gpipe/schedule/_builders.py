"""Schedules from the literature, for any number of micro-batches and stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ._actions import Kind, Program
from ._modes import Stops
from ._named import looped_placement, named
from ._schedule import Schedule
from ._v_shaped import v_placement


def clock_cycles(microbatches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, for each clock tick, the cells (micro-batch i, stage j) with i + j = tick, which can run in parallel.

    There are ``microbatches + stages - 1`` ticks (GPipe, section 2.3).

    Args:
        microbatches, stages: m and n.

    Returns:
        An iterator over the ticks, with the list of cells of each.

    >>> list(clock_cycles(3, 2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    """
    for tick in range(microbatches + stages - 1 if microbatches and stages else 0):
        first = max(tick - microbatches + 1, 0)
        yield [(tick - j, j) for j in range(first, min(tick + 1, stages))]


def fill_drain(microbatches: int, stages: int, checkpoint_stop: Stops = 0) -> Schedule:
    """Build GPipe's schedule: all forwards, then all backwards in reverse order (arXiv 1811.06965).

    Every micro-batch is in flight at once. A checkpointed micro-batch is recomputed just before its backward, while the
    stage would otherwise wait for the gradient::

        F0 F1 F2 .  .  .  R2 B2 R1 B1 R0 B0
        .  F0 F1 F2 R2 B2 R1 B1 R0 B0 .  .

    Args:
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages.
        checkpoint_stop: the first micro-batch that is not checkpointed, as one number or one per stage.

    Returns:
        A program per stage.

    Raises:
        ValueError: ``checkpoint_stop`` has the wrong length.

    >>> print(fill_drain(2, 1, checkpoint_stop=1))
    F0 F1 B1 R0 B0
    """
    return named("fill_drain", microbatches, range(stages), checkpoint_stop)


def one_forward_one_backward(microbatches: int, stages: int, checkpoint_stop: Stops = 0) -> Schedule:
    """Build 1F1B, which runs each backward as early as possible.

    It is as fast as fill-drain, but stage j has at most n − j micro-batches in flight.

    Source: PipeDream-Flush (Narayanan et al., arXiv 2006.09503)::

        F0 F1 F2 .  B0 F3 B1 .  B2 .  B3
        .  F0 F1 B0 F2 B1 F3 B2 .  B3 .

    Args:
        microbatches, stages, checkpoint_stop: as for :func:`fill_drain`.

    Returns:
        A program per stage.

    Raises:
        ValueError: ``checkpoint_stop`` has the wrong length.
    """
    return named("1f1b", microbatches, range(stages), checkpoint_stop)


def zero_bubble(
    microbatches: int, stages: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None
) -> Schedule:
    """Build 1F1B with split backwards: input gradients are sent first, and weight gradients fill the bubble.

    Stage j delays the weight gradients of j micro-batches, so every stage has at most n micro-batches in flight. If a
    forward and both parts of the backward each take the time t, and m ≥ n, the bubble is (n − 1)t, a third of the
    bubble of 1F1B.

    Source: ZB-H1 (Qi et al., arXiv 2401.10241)::

        F0 F1 .  I0 W0 F2 I1 W1 I2 W2
        .  F0 I0 F1 I1 W0 F2 I2 W1 W2

    Args:
        microbatches, stages, checkpoint_stop: as for :func:`fill_drain`.
        split: the stages whose backward is split, by default all. The remaining stages run it unsplit, as under 1F1B.

    Returns:
        A program per stage.

    Raises:
        ValueError: ``checkpoint_stop`` has the wrong length.
    """
    return named("zero_bubble", microbatches, range(stages), checkpoint_stop, split)


def interleaved(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0) -> Schedule:
    """Build 1F1B with v stages per worker, stage j on worker j mod k: the bubble is v times smaller.

    Groups of k micro-batches pass the first stage of every worker, then the second stages, and so on. With v = n / k,
    and m divisible by k, the bubble is 1 / v of the bubble of k stages. Worker r has at most
    2(k − r − 1) + (v − 1)k + 1 micro-batches in flight, counted once per stage.

    Source: Megatron-LM (Narayanan et al., arXiv 2104.04473, section 2.2).

    Args:
        microbatches, stages, checkpoint_stop: as for :func:`fill_drain`.
        workers: k, the number of workers.

    Returns:
        A program per stage.

    Raises:
        ValueError: ``stages`` is not divisible by ``workers``, or ``checkpoint_stop`` has the wrong length.
    """
    return named("interleaved", microbatches, looped_placement(stages, workers), checkpoint_stop)


def looped_bfs(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0) -> Schedule:
    """Build fill-drain with v stages per worker, stage j on worker j mod k: the bubble is v times smaller.

    It is breadth first: a worker computes all micro-batches on one of its stages before it starts its next stage, and
    the backwards in reverse order. So replicas can gather the parameters of a stage once, and reduce its gradients
    once; and a stage whose parameters are on the host is loaded only twice. By name, ``"looped_bfs"``, stages may be on
    any workers. If m ≥ k, a worker is idle for (k − 1)(f + b), where f and b are the times of a forward and a backward
    of one stage. It has v·m micro-batches in flight, counted once per stage.

    Source: Breadth-First Pipeline Parallelism (Lamy-Poirier, arXiv 2211.05953)::

        F0@0 F1@0 F0@2 F1@2 .    .    B1@2 B0@2 B1@0 B0@0
        .    F0@1 F1@1 F0@3 F1@3 B1@3 B0@3 B1@1 B0@1 .

    Args:
        microbatches, stages, workers, checkpoint_stop: as for :func:`interleaved`.

    Returns:
        A program per stage.

    Raises:
        ValueError: as for :func:`interleaved`.
    """
    return named("looped_bfs", microbatches, looped_placement(stages, workers), checkpoint_stop)


def interleaved_zero_bubble(
    microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None
) -> Schedule:
    """Build :func:`interleaved` with split backwards, as in :func:`zero_bubble`.

    Worker r delays the weight gradients of r micro-batches, and computes k − r − 1 fewer forwards in advance than
    :func:`interleaved`. If m is divisible by k, a worker is idle for (k − 1)(f + i − w), where f, i and w are the times
    of a forward and of the input and weight parts of a backward of one stage, with w ≤ i ≤ f. If no backward is split,
    it is idle for (k − 1)(f + b), with b = i + w. It has at most n micro-batches in flight, counted once per stage.

    Source: ZB-H1 (Qi et al., arXiv 2401.10241), applied to Megatron-LM's loops (Narayanan et al., arXiv 2104.04473).

    Args:
        microbatches, stages, workers, checkpoint_stop: as for :func:`interleaved`.
        split: the stages whose backward is split, by default all.

    Returns:
        A program per stage.

    Raises:
        ValueError: as for :func:`interleaved`.
    """
    return named("interleaved_zero_bubble", microbatches, looped_placement(stages, workers), checkpoint_stop, split)


def zbv(microbatches: int, stages: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None) -> Schedule:
    """Build ZB-V, which has no bubble and holds no more activations than 1F1B.

    Stage j is on worker j in the first half, and on worker n − 1 − j in the second half, so the last stage, where
    backwards start, is on the first worker. If a forward and both parts of the backward of a stage each take the time
    f, and m ≥ n − 1, none of the k = n / 2 workers waits between its first and its last step, and the run ends at
    (6m + k − 1)f. Each worker has at most n micro-batches in flight, counted once per stage.

    Source: ZB-V (Qi et al., arXiv 2401.10241, section 6, and arXiv 2405.15362)::

        F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 I1@3 W1@3 I0@0 W0@0 F2@3 I2@3 W2@3 I1@0 W1@0 I2@0 W2@0 .
        .    F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 F2@1 I0@1 W0@1 F2@2 I1@2 W1@2 I1@1 I2@2 I2@1 W1@1 W2@2 W2@1

    Args:
        microbatches, stages, checkpoint_stop: as for :func:`fill_drain`; the number of stages must be even.
        split: the stages whose backward is split, by default all. The remaining stages run it unsplit, when a split
            backward would compute the input gradients.

    Returns:
        A program per stage.

    Raises:
        ValueError: ``stages`` is odd, or ``checkpoint_stop`` has the wrong length.
    """
    return named("zbv", microbatches, v_placement(stages), checkpoint_stop, split)


def dualpipev(
    microbatches: int, stages: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None
) -> Schedule:
    """Build DualPipeV, which pairs forwards of one half of the stages with backwards of the other half.

    This is the half of DualPipe that has each parameter once, with stages placed as in :func:`zbv`. The two actions of
    a pair are independent, so the transfers of one overlap with the computation of the other. Pairs are formed in the
    middle of the run, and backwards are split only at its start and end.

    For one stage, let f be the time of a forward, b of an unsplit backward, w of its weight gradients, and f&b of a
    pair. The published bubble is (k − 1)(f&b + b − 3w) on k = n / 2 workers, for m ≥ n. Here the two actions of a pair
    run sequentially, so f&b = f + b, and the bubble is at most the published one if f ≤ b and 2w ≤ b. Each worker has
    at most n + 1 micro-batches in flight, counted once per stage.

    Source: DualPipe (DeepSeek-V3, arXiv 2412.19437), and DualPipeV, https://github.com/deepseek-ai/DualPipe.

    Args:
        microbatches, stages, checkpoint_stop, split: as for :func:`zbv`.

    Returns:
        A program per stage.

    Raises:
        ValueError: as for :func:`zbv`.
    """
    return named("dualpipev", microbatches, v_placement(stages), checkpoint_stop, split)


def split_forward_backward(schedule: Sequence[Program]) -> tuple[Schedule, Schedule]:
    """Split a schedule into its forwards and its remaining actions.

    Args:
        schedule: a program per stage, with all its forwards first.

    Returns:
        A schedule of the forwards, and one of the remaining actions.
    """
    # Autograd runs the backward in a separate call, so each half becomes its own schedule.
    forwards = [[action for action in program if action.kind == Kind.FORWARD] for program in schedule]
    rests = [program[len(head) :] for program, head in zip(schedule, forwards, strict=True)]
    worker_steps = getattr(schedule, "worker_steps", None)
    if worker_steps is None:
        return Schedule(forwards), Schedule(rests)
    first = tuple(tuple(step for step in line if step.action.kind == Kind.FORWARD) for line in worker_steps)
    later = tuple(tuple(step for step in line if step.action.kind != Kind.FORWARD) for line in worker_steps)
    return Schedule(forwards, first), Schedule(rests, later)
