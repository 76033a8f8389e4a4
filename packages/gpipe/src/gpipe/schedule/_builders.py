"""Schedules of the literature, for any number of micro-batches and stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from ._actions import Action, Kind, Program
from ._modes import Stops, stop_of_each
from ._orders import Order, drained, one_by_one, split_one_by_one
from ._schedule import Schedule

Making = Callable[[int], Order]
"""A function from the number of a stage to its order."""


def clock_cycles(microbatches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """The cells (micro-batch i, stage j) that may run at the same clock tick: those with i + j = tick.

    There are ``microbatches + stages - 1`` ticks (GPipe, section 2.3).

    Args:
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages.

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
    return schedule_by_stage(drain_orders(microbatches, stages, checkpoint_stop), stages)


def drain_orders(microbatches: int, stages: int, checkpoint_stop: Stops) -> Making:
    stops = stop_of_each(checkpoint_stop, stages)
    return lambda j: drained(microbatches, stops[j])


def one_forward_one_backward(microbatches: int, stages: int, checkpoint_stop: Stops = 0) -> Schedule:
    """Each backward as early as possible: as fast as fill-drain, but stage j holds at most n − j micro-batches.

    Source: PipeDream-Flush (Narayanan et al., arXiv 2006.09503)::

        F0 F1 F2 .  B0 F3 B1 .  B2 .  B3
        .  F0 F1 B0 F2 B1 F3 B2 .  B3 .

    Args:
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.

    Returns:
        A program for each stage.

    Raises:
        ValueError: ``checkpoint_stop`` has another length.
    """
    return schedule_by_stage(one_by_one_orders(microbatches, stages, checkpoint_stop), stages)


def one_by_one_orders(microbatches: int, stages: int, checkpoint_stop: Stops) -> Making:
    stops = stop_of_each(checkpoint_stop, stages)
    return lambda j: one_by_one(microbatches, stages - j, stops[j])


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
        microbatches: m, the number of micro-batches.
        stages: n, the number of stages.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: the stages whose backward is split, by default all; others compute it in one part, as under 1F1B.

    Returns:
        A program for each stage.

    Raises:
        ValueError: ``checkpoint_stop`` has another length.
    """
    return schedule_by_stage(split_orders(microbatches, stages, checkpoint_stop, split), stages)


def split_orders(
    microbatches: int, stages: int, checkpoint_stop: Stops, split: Collection[int] | None = None
) -> Making:
    stops = stop_of_each(checkpoint_stop, stages)

    def order(j: int) -> Order:
        if split is not None and j not in split:
            return one_by_one(microbatches, stages - j, stops[j])
        return split_one_by_one(microbatches, stages - j, j, stops[j])

    return order


def schedule_by_stage(order: Making, stages: int) -> Schedule:
    """The schedule in which each stage has the actions that ``order`` returns for it."""
    return Schedule(map(Action._make, order(j)) for j in range(stages))


def halves(schedule: Sequence[Program]) -> tuple[Schedule, Schedule]:
    """Split programs whose forwards all come first into forwards and the rest.

    Args:
        schedule: a program for each stage.

    Returns:
        The forwards, and the rest.
    """
    forwards = [[action for action in program if action.kind == Kind.FORWARD] for program in schedule]
    rests = [program[len(head) :] for program, head in zip(schedule, forwards, strict=True)]
    return Schedule(forwards), Schedule(rests)
