"""The steps of a worker of several stages, as generators: long schedules need not be in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ._actions import Action, Kind, Step
from ._makespan import Lane
from ._modes import Stops, stop_of_each
from ._schedule import Schedule

Steps = Iterator[tuple[int, tuple[Kind, int]]]
"""A :data:`Lane` as a generator."""


def adapted(
    lanes: Iterable[Lane], microbatches: int, stages: int, checkpoint_stop: Stops, split: Collection[int] | None = None
) -> list[Lane]:
    """The lanes of all workers, with recomputations and split backwards.

    Args:
        lanes: the steps of each worker. Steps of micro-batches that do not exist are left out, which causes no
            deadlock: micro-batches do not depend on each other.
        microbatches: the number of micro-batches.
        stages: the number of stages.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: the stages whose backward may be split, by default all.

    Raises ValueError if ``checkpoint_stop`` has another length.
    """
    stops = stop_of_each(checkpoint_stop, stages)
    whole = frozenset() if split is None else frozenset(range(stages)).difference(split)
    return [_adapted(lane, microbatches, stops, whole) for lane in lanes]


def _adapted(lane: Lane, microbatches: int, stops: tuple[int, ...], whole: frozenset[int]) -> Steps:
    for j, (kind, i) in lane:
        if i >= microbatches or (j in whole and kind is Kind.BACKWARD_WEIGHT):
            continue
        if i < stops[j] and kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            yield j, (Kind.RECOMPUTE, i)
        yield j, (Kind.BACKWARD if j in whole and kind is Kind.BACKWARD_INPUT else kind, i)


def schedule_by_worker(lanes: Iterable[Lane], stages: int) -> Schedule:
    """The schedule in which each worker does the steps of its lane."""
    walk = tuple(tuple(Step(j, Action(*action)) for j, action in lane) for lane in lanes)
    programs: list[list[Action]] = [[] for _ in range(stages)]
    for step in (step for steps in walk for step in steps):
        programs[step.stage].append(step.action)
    return Schedule(programs, walk)
