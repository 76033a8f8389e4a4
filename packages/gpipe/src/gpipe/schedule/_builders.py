"""Schedules of the literature, for any number of micro-batches and stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ._actions import Kind, Program
from ._modes import Stops
from ._named import looped_placement, named
from ._schedule import Schedule
from ._v_shaped import v_placement


def clock_cycles(microbatches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """The cells (micro-batch i, stage j) that may run at the same clock tick: those with i + j = tick.

    There are ``microbatches + stages - 1`` ticks (GPipe, section 2.3).

    Args:
        microbatches, stages: m and n.

    Returns:
        The cells of each tick in turn.

    >>> list(clock_cycles(3, 2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    """
    for tick in range(microbatches + stages - 1 if microbatches and stages else 0):
        first = max(tick - microbatches + 1, 0)
        yield [(tick - j, j) for j in range(first, min(tick + 1, stages))]


def fill_drain(microbatches: int, stages: int, checkpoint_stop: Stops = 0) -> Schedule:
    """All forwards, then all backwards in reverse; holds every micro-batch at once (GPipe, arXiv 1811.06965).

    A checkpointed micro-batch is recomputed just before its backward, while the stage would otherwise wait for the
    gradient::

        F0 F1 F2 .  .  .  R2 B2 R1 B1 R0 B0
        .  F0 F1 F2 R2 B2 R1 B1 R0 B0 .  .

    Args:
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.

    Returns:
        A program for each stage.

    Raises:
        ValueError: ``checkpoint_stop`` has another length.

    >>> print(fill_drain(2, 1, checkpoint_stop=1))
    F0 F1 B1 R0 B0
    """
    return named("fill_drain", microbatches, range(stages), checkpoint_stop)


def one_forward_one_backward(microbatches: int, stages: int, checkpoint_stop: Stops = 0) -> Schedule:
    """Each backward as early as possible: as fast as fill-drain, but stage j holds at most n − j micro-batches.

    Source: PipeDream-Flush (Narayanan et al., arXiv 2006.09503)::

        F0 F1 F2 .  B0 F3 B1 .  B2 .  B3
        .  F0 F1 B0 F2 B1 F3 B2 .  B3 .

    Args:
        microbatches, stages, checkpoint_stop: as for :func:`fill_drain`.

    Returns:
        A program for each stage.

    Raises:
        ValueError: ``checkpoint_stop`` has another length.
    """
    return named("1f1b", microbatches, range(stages), checkpoint_stop)


def zero_bubble(
    microbatches: int, stages: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None
) -> Schedule:
    """1F1B with split backwards: gradients of inputs are sent first, those of weights are computed in the bubble.

    Stage j delays the weights of j micro-batches, so every stage holds at most n of them. If a forward and both parts
    of the backward each take the time t, and m ≥ n, the bubble is (n − 1)t, a third of 1F1B's.

    Source: ZB-H1 (Qi et al., arXiv 2401.10241)::

        F0 F1 .  I0 W0 F2 I1 W1 I2 W2
        .  F0 I0 F1 I1 W0 F2 I2 W1 W2

    Args:
        microbatches, stages, checkpoint_stop: as for :func:`fill_drain`.
        split: the stages whose backward is split, by default all; others compute it in one part, as under 1F1B.

    Returns:
        A program for each stage.

    Raises:
        ValueError: ``checkpoint_stop`` has another length.
    """
    return named("zero_bubble", microbatches, range(stages), checkpoint_stop, split)


def interleaved(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0) -> Schedule:
    """1F1B with v stages on each worker, stage j on worker j mod k: the bubble is v times smaller.

    Groups of k micro-batches go through the first stage of every worker, then through the second stages, and so on.
    With v = n / k, the bubble is that of k stages divided by v, if m is divisible by k. Worker r holds at most 2(k − r
    − 1) + (v − 1)k + 1 micro-batches of one stage.

    Source: Megatron-LM (Narayanan et al., arXiv 2104.04473, section 2.2).

    Args:
        microbatches, stages, checkpoint_stop: as for :func:`fill_drain`.
        workers: k, the number of workers.

    Returns:
        A program for each stage.

    Raises:
        ValueError: the number of stages is not divisible by that of workers, or ``checkpoint_stop`` has another length.
    """
    return named("interleaved", microbatches, looped_placement(stages, workers), checkpoint_stop)


def looped_bfs(microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0) -> Schedule:
    """Fill-drain with v stages on each worker, stage j on worker j mod k: the bubble is v times smaller.

    Breadth first: a worker computes all micro-batches on one of its stages before it begins the next stage, and the
    backwards in reverse. So replicas can gather the parameters of a stage, and reduce its gradients, once each. If m ≥
    k, a worker is idle for (k − 1)(f + b), where f and b are the times of a forward and a backward of one stage. It
    holds v·m micro-batches of one stage.

    Source: Breadth-First Pipeline Parallelism (Lamy-Poirier, arXiv 2211.05953)::

        F0@0 F1@0 F0@2 F1@2 .    .    B1@2 B0@2 B1@0 B0@0
        .    F0@1 F1@1 F0@3 F1@3 B1@3 B0@3 B1@1 B0@1 .

    Args:
        microbatches, stages, workers, checkpoint_stop: as for :func:`interleaved`.

    Returns:
        A program for each stage.

    Raises:
        ValueError: as :func:`interleaved`.
    """
    return named("looped_bfs", microbatches, looped_placement(stages, workers), checkpoint_stop)


def interleaved_zero_bubble(
    microbatches: int, stages: int, workers: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None
) -> Schedule:
    """Zero bubble with v stages on each worker, stage j on worker j mod k: the bubble is v times smaller.

    :func:`interleaved` with split backwards. Worker r delays the weights of r micro-batches, and computes k − r − 1
    fewer forwards in advance. If m is divisible by k, a worker is idle for (k − 1)(f + i − w), where f, i and w are the
    times of a forward and both parts of the backward of one stage, with w ≤ i ≤ f; if no backward is split, for (k −
    1)(f + b). It holds at most n micro-batches of one stage.

    Source: ZB-H1 (Qi et al., arXiv 2401.10241) on the loops of Megatron-LM (Narayanan et al., arXiv 2104.04473).

    Args:
        microbatches, stages, workers, checkpoint_stop: as for :func:`interleaved`.
        split: the stages whose backward is split, by default all.

    Returns:
        A program for each stage.

    Raises:
        ValueError: as :func:`interleaved`.
    """
    return named("interleaved_zero_bubble", microbatches, looped_placement(stages, workers), checkpoint_stop, split)


def zbv(microbatches: int, stages: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None) -> Schedule:
    """ZB-V: no bubble, and no more activations than under 1F1B.

    Stage j is on worker j in the first half, and on worker n − 1 − j in the second, so the last stage, where backwards
    begin, is on the first worker. If a forward and both parts of the backward of a stage each take the time f, and m ≥
    n − 1, none of the k = n / 2 workers waits between its first step and its last; the step ends at (6m + k − 1)f. Each
    worker holds at most n micro-batches of one stage.

    Source: ZB-V (Qi et al., arXiv 2401.10241, section 6, and arXiv 2405.15362)::

        F0@0 F1@0 F2@0 F0@3 I0@3 W0@3 F1@3 I1@3 W1@3 I0@0 W0@0 F2@3 I2@3 W2@3 I1@0 W1@0 I2@0 W2@0 .
        .    F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 F2@1 I0@1 W0@1 F2@2 I1@2 W1@2 I1@1 I2@2 I2@1 W1@1 W2@2 W2@1

    Args:
        microbatches, stages, checkpoint_stop: as for :func:`fill_drain`; the number of stages is even.
        split: the stages whose backward is split, by default all; the others compute it at the place of its first part.

    Returns:
        A program for each stage.

    Raises:
        ValueError: the number of stages is odd, or ``checkpoint_stop`` has another length.
    """
    return named("zbv", microbatches, v_placement(stages), checkpoint_stop, split)


def dualpipev(
    microbatches: int, stages: int, checkpoint_stop: Stops = 0, split: Collection[int] | None = None
) -> Schedule:
    """DualPipeV: in the middle of the run, forwards of one half are paired with backwards of the other.

    This is the half of DualPipe that has each parameter once, with stages placed as for :func:`zbv`. The two actions of
    a pair are independent, so the transfers of one overlap with the computation of the other. Backwards are split at
    the start and the end of the run only.

    Let f be the time of a forward of a stage, b that of a whole backward, w that of its part for the weights, and f&b
    that of a pair. The published bubble is (k − 1)(f&b + b − 3w) on k = n / 2 workers, for m ≥ n. Here the two actions
    of a pair run one after the other, so f&b = f + b, and the bubble is at most that if f ≤ b and 2w ≤ b. Each worker
    holds at most n + 1 micro-batches of one stage.

    Source: DualPipe (DeepSeek-V3, arXiv 2412.19437), and DualPipeV, https://github.com/deepseek-ai/DualPipe.

    Args:
        microbatches, stages, checkpoint_stop, split: as for :func:`zbv`.

    Returns:
        A program for each stage.

    Raises:
        ValueError: as :func:`zbv`.
    """
    return named("dualpipev", microbatches, v_placement(stages), checkpoint_stop, split)


def halves(schedule: Sequence[Program]) -> tuple[Schedule, Schedule]:
    """Split programs whose forwards all come first into forwards and the rest.

    Args:
        schedule: a program for each stage.

    Returns:
        The forwards, and the rest.
    """
    # Autograd asks for the backward later than for the forward: each half is a schedule of its own.
    forwards = [[action for action in program if action.kind == Kind.FORWARD] for program in schedule]
    rests = [program[len(head) :] for program, head in zip(schedule, forwards, strict=True)]
    return Schedule(forwards), Schedule(rests)
