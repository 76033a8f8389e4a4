"""Which micro-batches a stage holds, and what of them, while it does an action."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from ..schedule import Kind
from ..schedule._orders import Order, drained, one_by_one, split_one_by_one


class Moment(NamedTuple):
    """A stage does an action on a micro-batch while it holds others.

    Attributes:
        kind: of the action.
        checkpointed: whether a forward lets go of what it saved.
        begun: whether the gradients of an earlier micro-batch are there.
        first: whether the first micro-batch is among them all.
        whole: how many others hold all that they saved.
        bare: how many hold their inputs only.
        late: how many wait for the part of their backward for the weights.
    """

    kind: Kind
    checkpointed: bool
    begun: bool
    first: bool
    whole: int
    bare: int
    late: int


@lru_cache(maxsize=4096)
def moments(schedule: str, mode: str, microbatches: int, stages: int, stage: int, split: bool) -> tuple[Moment, ...]:
    """The moments at which a stage may hold the most; under fill-drain also those with the fewest micro-batches left.

    Schedules repeat themselves, so a few micro-batches show all moments.

    Args:
        schedule: its name.
        mode: how the stage is checkpointed.
        microbatches, stages: how many there are.
        stage: its number.
        split: whether its backward is.

    >>> for moment in sorted(moments("1f1b", "never", 8, 2, 0, False)):
    ...     print(moment.kind, moment.begun, moment.whole)
    backward False 1
    backward True 1
    forward False 1
    forward True 1
    """
    few = min(microbatches, 3 if schedule == "fill_drain" else 2 * stages + 2)
    stop = {"never": 0, "except_last": few - 1, "always": few}[mode]
    order = list(_order(schedule, few, stages, stage, split, stop))
    if schedule != "fill_drain":
        return _most(_moments(order, stop, (0, 0)))
    more = microbatches - few  # the first ones, which wait for all that is shown
    fullest = _most(_moments(order, stop, (more, 0) if mode == "never" else (0, more)))
    # The fewer are left, the more gradients may wait for the stage before.
    return tuple(dict.fromkeys([*fullest, *_most(_moments(order, stop, (0, 0)), _emptier)]))


def _order(schedule: str, microbatches: int, stages: int, stage: int, split: bool, stop: int) -> Order:
    if schedule == "fill_drain":
        return drained(microbatches, stop)
    if split:
        return split_one_by_one(microbatches, stages - stage, stage, stop)
    return one_by_one(microbatches, stages - stage, stop)


def _moments(order: Iterable[tuple[Kind, int]], stop: int, before: tuple[int, int]) -> Iterator[Moment]:
    """All moments of a stage that holds ``before`` already: micro-batches as a whole, and bare ones."""
    whole, bare, late = set[int](), set[int](), set[int]()
    begun, first = False, True
    for kind, i in order:
        for each in (whole, bare, late):
            each.discard(i)
        yield Moment(kind, i < stop, begun, first, len(whole) + before[0], len(bare) + before[1], len(late))
        begun = begun or kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        first = first and not (i == 0 and kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
        if kind == Kind.RECOMPUTE or (kind == Kind.FORWARD and i >= stop):
            whole.add(i)
        elif kind == Kind.FORWARD:
            bare.add(i)
        elif kind == Kind.BACKWARD_INPUT:
            late.add(i)


def _fuller(a: Moment, b: Moment) -> bool:
    """Whether ``a`` holds no less of anything than ``b``."""
    return a.whole >= b.whole and a.bare >= b.bare and a.late >= b.late


def _emptier(a: Moment, b: Moment) -> bool:
    """Whether ``a`` holds no more of anything than ``b``."""
    return _fuller(b, a)


def _most(found: Iterable[Moment], covers: Callable[[Moment, Moment], bool] = _fuller) -> tuple[Moment, ...]:
    """Without those that another one of the same kind covers."""
    kept: dict[tuple[Kind, bool, bool, bool], list[Moment]] = {}
    for moment in dict.fromkeys(found):
        rivals = kept.setdefault(moment[:4], [])
        if not any(covers(rival, moment) for rival in rivals):
            rivals[:] = [*(rival for rival in rivals if not covers(moment, rival)), moment]
    return tuple(moment for rivals in kept.values() for moment in rivals)
