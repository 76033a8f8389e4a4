"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import repeat

from .._meant import did_you_mean
from ._builders import Making, drain_orders, one_by_one_orders, schedule_by_stage, split_orders
from ._lanes import schedule_by_worker
from ._looped import interleaved_lanes, interleaved_zero_bubble_lanes, looped_bfs_lanes, looped_placement
from ._makespan import Lane
from ._modes import Stops
from ._schedule import Schedule
from ._v_shaped import dualpipev_lanes, v_placement, zbv_lanes


def named(
    name: str,
    microbatches: int,
    placement: Sequence[int],
    checkpoint_stop: Stops = 0,
    split: Collection[int] | None = None,
) -> Schedule:
    """The schedule called ``name``, in capitals or not, for stages on the workers of ``placement``.

    Args:
        name: one of :data:`gpipe.schedule.SCHEDULES`.
        microbatches: m, the number of micro-batches.
        placement: the worker of each stage.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: for schedules in :data:`gpipe.schedule.SPLITTING`, the stages whose backward is split; by default all.

    Returns:
        The schedule.

    Raises:
        ValueError: there is no schedule of this name; or it needs another placement, which the message names.

    >>> print(named("zbv", 1, [0, 1, 1, 0]))
    F0@0 F0@3 I0@3 W0@3 I0@0 W0@0
    F0@1 F0@2 I0@2 W0@2 I0@1 W0@1
    """
    expect_name(name, SCHEDULES)
    name, stages = name.lower(), len(placement)
    _expect_fitting(name, placement)
    if name in _ORDERS:
        return schedule_by_stage(_ORDERS[name](microbatches, stages, checkpoint_stop, split), stages)
    workers = len(set(placement))
    return schedule_by_worker(_LANES[name](microbatches, stages, workers, checkpoint_stop, split), stages)


def lanes(
    name: str,
    microbatches: int,
    placement: Sequence[int],
    checkpoint_stop: Stops = 0,
    split: Collection[int] | None = None,
) -> Sequence[Lane]:
    """The steps of each worker under :func:`named`; generated while they are read, for the usual placement."""
    expect_name(name, SCHEDULES)
    name, stages = name.lower(), len(placement)
    _expect_fitting(name, placement)
    if name in _ORDERS and list(placement) == list(range(stages)):
        order = _ORDERS[name](microbatches, stages, checkpoint_stop, split)
        return [zip(repeat(j), order(j), strict=False) for j in range(stages)]
    if name in _LANES and list(placement) != [0] * stages:
        return _LANES[name](microbatches, stages, len(set(placement)), checkpoint_stop, split)
    return named(name, microbatches, placement, checkpoint_stop, split).on(placement)


def usual_placement(name: str, stages: int) -> list[int]:
    """The default worker of each stage: that of a V for schedules that need it, else one worker for each stage."""
    return v_placement(stages) if name.lower() in _V_SHAPED else list(range(stages))


def expect_name(name: str, names: Iterable[str]) -> None:
    """Raise ValueError, with the list of ``names``, unless ``name``, in capitals or not, is one of them."""
    names = list(names)
    if name.lower() not in names:
        raise ValueError(
            f"there is no schedule {name!r}; choose one of {', '.join(map(repr, names))}" + did_you_mean(name, names)
        )


def expect_schedule(schedule: object, names: Iterable[str]) -> None:
    """Raise TypeError unless ``schedule`` is a schedule or a name, and ValueError if that is none of ``names``."""
    if isinstance(schedule, str):
        expect_name(schedule, names)
    elif not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule must be a name such as '1f1b', or a gpipe.schedule.Schedule; got {type(schedule).__name__}"
        )


def _expect_fitting(name: str, placement: Sequence[int]) -> None:
    """Raise ValueError unless ``placement`` is one that the schedule called ``name`` can use."""
    workers = len(set(placement))
    if name in _LOOPED and list(placement) != looped_placement(len(placement), workers):
        wanted = "takes the workers in turn, as in devices=[0, 1, 0, 1], or ['cpu:0', 'cpu:1'] * 2 on the CPU"
    # A single worker, as in an inline run, does the steps of all workers in their order.
    elif name in _V_SHAPED and workers > 1 and list(placement) != v_placement(len(placement)):
        wanted = (
            "goes down all workers and up again, as in devices=[0, 1, 1, 0], or ['cpu:0', 'cpu:1', 'cpu:1', 'cpu:0'] "
            "on the CPU"
        )
    else:
        return
    raise ValueError(f"schedule={name!r} {wanted}; these stages are on workers {list(placement)}")


_LOOPED = ("interleaved", "looped_bfs", "interleaved_zero_bubble")
_V_SHAPED = ("zbv", "dualpipev")
_ORDERS: dict[str, Callable[[int, int, Stops, Collection[int] | None], Making]] = {
    "fill_drain": lambda m, n, stop, split: drain_orders(m, n, stop),
    "1f1b": lambda m, n, stop, split: one_by_one_orders(m, n, stop),
    "zero_bubble": split_orders,
}
_LANES: dict[str, Callable[[int, int, int, Stops, Collection[int] | None], list[Lane]]] = {
    "interleaved": lambda m, n, k, stop, split: interleaved_lanes(m, n, k, stop),
    "looped_bfs": lambda m, n, k, stop, split: looped_bfs_lanes(m, n, k, stop),
    "interleaved_zero_bubble": interleaved_zero_bubble_lanes,
    "zbv": lambda m, n, k, stop, split: zbv_lanes(m, n, stop, split),
    "dualpipev": lambda m, n, k, stop, split: dualpipev_lanes(m, n, stop, split),
}


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    name: partial(named, name)
    for name in (
        "fill_drain",
        "1f1b",
        "interleaved",
        "looped_bfs",
        "zero_bubble",
        "interleaved_zero_bubble",
        "zbv",
        "dualpipev",
    )
}
"""By name, a function that makes the schedule: :func:`named` without its first argument."""

SPLITTING = ("zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipev")
"""The names of the schedules that split backwards."""
