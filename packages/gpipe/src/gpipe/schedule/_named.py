"""Schedules by their names, as people ask for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import repeat

from .._meant import did_you_mean
from ._builders import (
    Making,
    drain_orders,
    fill_drain,
    interleaved,
    one_by_one_orders,
    one_forward_one_backward,
    split_orders,
    zero_bubble,
)
from ._makespan import Lane
from ._modes import Stops
from ._schedule import Schedule


def named(
    name: str,
    microbatches: int,
    placement: Sequence[int],
    checkpoint_stop: Stops = 0,
    split: Collection[int] | None = None,
) -> Schedule:
    """The schedule called ``name``, in capitals or not, for stages on the workers of ``placement``.

    Args:
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        split: under ``"zero_bubble"``, the stages whose backward runs in two parts; all by default.

    Raises ValueError, with the list of names, if there is none.
    """
    expect_name(name, SCHEDULES)
    if name.lower() == "zero_bubble":
        return zero_bubble(microbatches, len(placement), checkpoint_stop, split)
    return SCHEDULES[name.lower()](microbatches, placement, checkpoint_stop)


def lanes(
    name: str,
    microbatches: int,
    placement: Sequence[int],
    checkpoint_stop: Stops = 0,
    split: Collection[int] | None = None,
) -> Sequence[Lane]:
    """The steps of each worker under :func:`named`, made while they are read where each stage has a worker."""
    stages = len(placement)
    orders = ORDERS.get(name.lower())
    if orders is None or list(placement) != list(range(stages)):
        return named(name, microbatches, placement, checkpoint_stop, split).on(placement)
    order = orders(microbatches, stages, checkpoint_stop, split)
    return [zip(repeat(j), order(j), strict=False) for j in range(stages)]


def expect_name(name: str, names: Iterable[str]) -> None:
    """Raise ValueError, with the list of ``names``, unless ``name``, in capitals or not, is one of them."""
    names = list(names)
    if name.lower() not in names:
        raise ValueError(
            f"there is no schedule {name!r}; choose one of {', '.join(map(repr, names))}" + did_you_mean(name, names)
        )


def _looped(microbatches: int, placement: Sequence[int], checkpoint_stop: Stops) -> Schedule:
    return interleaved(microbatches, len(placement), expect_turns(placement), checkpoint_stop)


def expect_turns(placement: Sequence[int]) -> int:
    """How many workers take the stages in turn; ValueError if they do not."""
    workers = len(set(placement))
    if list(placement) != [j % workers for j in range(len(placement))]:
        raise ValueError(
            f"interleaving takes the workers in turn, as in devices=[0, 1, 0, 1]; these stages are on workers "
            f"{list(placement)}"
        )
    return workers


def _plain(make: Callable[[int, int, Stops], Schedule]) -> Callable[[int, Sequence[int], Stops], Schedule]:
    return lambda microbatches, placement, stop: make(microbatches, len(placement), stop)


SCHEDULES: dict[str, Callable[[int, Sequence[int], Stops], Schedule]] = {
    "fill_drain": _plain(fill_drain),
    "1f1b": _plain(one_forward_one_backward),
    "interleaved": _looped,
    "zero_bubble": _plain(zero_bubble),
}
ORDERS: dict[str, Callable[[int, int, Stops, Collection[int] | None], Making]] = {
    "fill_drain": lambda m, n, stop, split: drain_orders(m, n, stop),
    "1f1b": lambda m, n, stop, split: one_by_one_orders(m, n, stop),
    "zero_bubble": split_orders,
}
