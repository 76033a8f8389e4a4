"""Look up schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from ._lanes import (
    Steps,
    adapt_lane,
    breadth_first_steps,
    fill_drain_steps,
    interleaved_steps,
    steps_1f1b,
    zero_bubble_steps,
)
from ._modes import Stops, stop_of_each
from ._replay import Lane, steps_of_lanes
from ._schedule import Schedule, build_programs
from ._v_shaped import dualpipev_turns, v_placement, v_shaped, zbv_turns

_MAKERS: dict[str, Callable[[int, int, int, int], Steps]] = {
    "fill_drain": fill_drain_steps,
    "1f1b": steps_1f1b,
    "interleaved": interleaved_steps,
    "looped_bfs": fill_drain_steps,  # for any placement: see _build_steps
    "zero_bubble": zero_bubble_steps,
    "interleaved_zero_bubble": zero_bubble_steps,
    "zbv": partial(v_shaped, zbv_turns),
    "dualpipev": partial(v_shaped, dualpipev_turns),
}
"""Functions that generate the steps of worker r, given m micro-batches, n stages, k workers and r."""

_LOOPED = ("interleaved", "interleaved_zero_bubble")
_V_SHAPED = ("zbv", "dualpipev")

BREADTH_FIRST = "looped_bfs"
"""The name of the schedule in which a worker finishes the forwards of a stage before it starts its next stage."""

SPLITTING = ("zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipev")
"""The names of the schedules that split backwards."""


def named(
    name: str,
    microbatches: int,
    placement: Sequence[int],
    checkpoint_stop: Stops = 0,
    split: Collection[int] | None = None,
) -> Schedule:
    """Build the schedule called ``name`` for stages on the workers of ``placement``.

    Args:
        name: one of :data:`gpipe.schedule.SCHEDULES`, in upper or lower case.
        microbatches, checkpoint_stop: as for :func:`fill_drain`.
        placement: the worker of each stage.
        split: for schedules in :data:`gpipe.schedule.SPLITTING`, the stages whose backward is split; by default all.

    Returns:
        The schedule.

    Raises:
        ValueError: the name is unknown, the schedule needs a different placement, which the message describes, or
            ``checkpoint_stop`` has the wrong length.

    >>> print(named("zbv", 1, [0, 1, 1, 0]))
    F0@0 F0@3 I0@3 W0@3 I0@0 W0@0
    F0@1 F0@2 I0@2 W0@2 I0@1 W0@1
    """
    own = _build_steps(name, microbatches, _own_placement(name, placement), checkpoint_stop, split)
    worker_steps = steps_of_lanes(own)
    return Schedule(build_programs(worker_steps, len(placement)), worker_steps)


def lanes(
    name: str,
    microbatches: int,
    placement: Sequence[int],
    checkpoint_stop: Stops = 0,
    split: Collection[int] | None = None,
) -> Sequence[Lane]:
    """Return the steps of each worker under :func:`named`, as generators where possible.

    Generators let a replay of many stages run without storing the steps. If ``placement`` puts the stages of several of
    the schedule's workers on one worker, the steps are stored and merged.
    """
    own = _own_placement(name, placement)
    if own == list(placement):
        return _build_steps(name, microbatches, own, checkpoint_stop, split)
    return named(name, microbatches, placement, checkpoint_stop, split).on(placement)


def _build_steps(name: str, m: int, own: Sequence[int], stop: Stops, split: Collection[int] | None) -> list[Steps]:
    stages, workers, make = len(own), len(set(own)), _MAKERS[name.lower()]
    stops = stop_of_each(stop, stages)
    whole = frozenset() if split is None else frozenset(range(stages)).difference(split)
    if name.lower() == BREADTH_FIRST:
        steps = [breadth_first_steps(m, [j for j, worker in enumerate(own) if worker == r]) for r in range(workers)]
    else:
        steps = [make(m, stages, workers, r) for r in range(workers)]
    # With nothing to adapt, skip one level of generators; there may be millions of steps.
    if not (any(stops) or whole or m % max(1, workers) or name.lower() in _V_SHAPED):
        return steps
    return [adapt_lane(each, m, stops, whole) for each in steps]


def usual_placement(name: str, stages: int) -> list[int]:
    """Return the default worker of each stage: a V for the schedules that need one, else one worker per stage."""
    return v_placement(stages) if name.lower() in _V_SHAPED else list(range(stages))


def looped_placement(stages: int, workers: int) -> list[int]:
    """Place stage j on worker j mod k.

    Args:
        stages: n, the number of stages.
        workers: k, the number of workers.

    Returns:
        The index of the worker of each stage.

    Raises:
        ValueError: ``stages`` is not divisible by ``workers``, or ``workers`` is less than 1.

    >>> looped_placement(6, 2)
    [0, 1, 0, 1, 0, 1]
    """
    if workers < 1 or stages % workers:
        raise ValueError(
            f"looped schedules need the same number of stages on every worker, but {stages} is not divisible by "
            f"{workers}; choose a balance with a multiple of {workers} partitions"
        )
    return [j % workers for j in range(stages)]


def _own_placement(name: str, placement: Sequence[int]) -> list[int]:
    """Return the placement that the schedule is built for, or raise ValueError if it cannot run on ``placement``."""
    expect_name(name, SCHEDULES)
    workers = len(set(placement))
    if name.lower() == BREADTH_FIRST:
        numbers = {worker: number for number, worker in enumerate(sorted(set(placement)))}
        return [numbers[worker] for worker in placement]
    if name.lower() in _LOOPED and placement:
        own = looped_placement(len(placement), workers)
        needed = "needs its stages on the workers in turn, as in devices=[0, 1, 0, 1] or ['cpu:0', 'cpu:1'] * 2"
    elif name.lower() in _V_SHAPED and workers != 1:
        own = v_placement(len(placement))
        needed = (
            "needs its stages down all workers and up again, as in devices=[0, 1, 1, 0] or "
            "['cpu:0', 'cpu:1', 'cpu:1', 'cpu:0']"
        )
    else:  # a single worker, as in an inline run, can run the steps of all workers
        return usual_placement(name, len(placement))
    if own != list(placement):
        raise ValueError(f"schedule={name!r} {needed}; got stages on workers {list(placement)}")
    return own


def expect_name(name: str, names: Collection[str]) -> None:
    if name.lower() not in names:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(map(repr, names))}")


def expect_schedule(schedule: object, names: Collection[str]) -> None:
    if isinstance(schedule, str):
        expect_name(schedule, names)
    elif not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule must be a name such as '1f1b', or a gpipe.schedule.Schedule; got {type(schedule).__name__}"
        )


SCHEDULES: dict[str, Callable[..., Schedule]] = {name: partial(named, name) for name in _MAKERS}
"""Builders of all schedules by name, each :func:`named` with its first argument bound."""
