"""Search a schedule for the costs of stages and the memory of workers, instead of taking one by its name.

The search is deterministic: its effort is counted in actions, not in seconds.

1. All named schedules that suit the placement are replayed, so the result is never slower than one of them that fits.
2. Actions are laid greedily by some rules, and in the periodic orders of some paces. For many micro-batches, rules and
   paces are compared on fewer, and only the best of them lay all actions.
3. The best orders are improved by exchanges on their critical path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import isfinite
from typing import TypeVar

from ._actions import Kind
from ._coded import SLOTS, Coded, Order
from ._exchange import improve
from ._greedy import Rule, lay, least_bytes
from ._modes import Stops, stop_of_each
from ._named import SCHEDULES, lanes, named
from ._periodic import Pace, periodic
from ._problem import Limits, Problem
from ._replay import KindSeconds
from ._schedule import Schedule, build_programs

Way = TypeVar("Way", Rule, Pace)

_ENOUGH = 1e6  # for any number of forwards in advance
_RULES = [
    Rule(ahead, lag, patience, forward_first)
    for lag, patience, ahead, forward_first in product(
        (_ENOUGH, 1.0, 0.0), (0.0, 0.5), (1.0, 2.0, 1.5, _ENOUGH), (False, True)
    )
]
_STRETCHES = (0.0, 0.0), (0.25, 0.25), (1.0, 0.0), (1.0, 1.0), (0.5, 0.5), (0.0, 1.0)
_PACES = [Pace(*each) for each in product((1.0, 1.05, 1.1, 1.2, 1.4, 1.6, 2.0, 2.5), _STRETCHES, (False, True))]

_LAID, _PACED, _REPLAYED = 18_000, 90_000, 120_000
"""How many actions are laid by rules, put into periodic orders, and replayed in exchanges."""

_KEPT_RULES, _KEPT_PACES = 2, 3
"""How many rules, and paces, lay all actions."""


def search(
    microbatches: int,
    placement: Sequence[int],
    seconds: KindSeconds | None = None,
    *,
    hops: Sequence[float] | None = None,
    activation_bytes: Sequence[int] | None = None,
    boundary_bytes: Sequence[int] | None = None,
    memory: Limits = None,
    checkpoint_stop: Stops = 0,
    split: Collection[int] | None = None,
) -> Schedule:
    """Search a fast schedule that fits into memory, for any costs and any placement.

    It is at least as fast as every schedule in :data:`gpipe.schedule.SCHEDULES` that suits the placement and fits, by
    :func:`gpipe.schedule.replay`. It also fits where none of them does: a worker needs memory for one micro-batch.
    The same arguments give the same schedule. It takes less than a second for 8 workers and 64 micro-batches.

    Args:
        microbatches: m, the number of micro-batches.
        placement: the worker of each stage, counted from 0.
        seconds: the durations of the actions of each stage, by kind: forward, recompute, backward and its two parts. By
            default 1 each, and 2 of an unsplit backward.
        hops: the transfer time from the previous stage to each stage, and of a gradient back to it; 0 by default.
        activation_bytes: bytes that each stage saves for the backward of a micro-batch; 1 by default, so ``memory``
            counts micro-batches in flight.
        boundary_bytes: bytes that each stage keeps of a checkpointed micro-batch before its recomputation; 0 by
            default.
        memory: the most bytes of activations that a worker may hold, as one number or one per worker; None is no limit.
        checkpoint_stop: the first micro-batch that is not checkpointed, as one number or one per stage.
        split: the stages whose backward is split, by default all. Others run it unsplit.

    Returns:
        The schedule, with the order of each worker.

    Raises:
        ValueError: an argument has the wrong length or an invalid value, or ``memory`` is too small for a single
            micro-batch; the message has the worker and the bytes that it needs.

    Source: the heuristic of Zero Bubble Pipeline Parallelism (arXiv 2401.10241), the building blocks of arXiv
    2405.15362, and the search under limits of memory of OptPipe (arXiv 2510.05186).

    >>> print(search(2, [0, 1], memory=1))
    F0 I0 W0 F1 I1 W1
    F0 I0 W0 F1 I1 W1
    """
    if not (microbatches and placement):
        return named("1f1b", microbatches, placement)
    numbers = sorted(set(placement))
    n = len(placement)
    whole = [1] * n if activation_bytes is None else activation_bytes
    bare = [0] * n if boundary_bytes is None else boundary_bytes
    _expect_one_each(n, seconds=seconds, hops=hops, activation_bytes=whole, boundary_bytes=bare)
    problem = Problem(
        microbatches=microbatches,
        placement=tuple(map(numbers.index, placement)),
        seconds=[_UNITS] * n if seconds is None else seconds,
        hops=tuple([0.0] * n if hops is None else hops),
        whole=tuple(whole),
        bare=tuple(bare),
        limits=_limits(memory, numbers),
        stops=tuple(min(max(0, stop), microbatches) for stop in stop_of_each(checkpoint_stop, n)),
        split=tuple(split is None or j in split for j in range(n)),
    )
    _expect_costs(problem.seconds, problem.hops, problem.whole, problem.bare)
    _expect_room(problem, numbers)
    coded = Coded(problem)
    worker_steps = coded.worker_steps(best_order(coded))
    return Schedule(build_programs(worker_steps, problem.stages), worker_steps)


def best_order(coded: Coded) -> Order:
    """Return the fastest order that is found and fits; a named one if no other is faster."""
    problem, bound = coded.problem, compute_lower_bound(coded.problem)
    # The bound is a sum in a different order than a replay's.
    bound *= 1 + 1e-9
    known = sorted(_find_named_orders(coded), key=coded.score)[:1]
    if known and coded.makespan(known[0]) <= bound:
        return known[0]
    small = Coded(_with_fewer(problem))
    ways = _select_best(coded, small, _RULES[: _LAID // small.problem.actions + 1], lay, _KEPT_RULES)
    ways += _select_best(coded, small, _PACES[: _PACED // small.problem.actions + 1], periodic, _KEPT_PACES)
    starts = [*known, *ways]
    replays = _REPLAYED // problem.actions // max(1, len(starts))
    return min([*known, *(improve(coded, order, replays, bound) for order in starts)], key=coded.score)


def compute_lower_bound(problem: Problem) -> float:
    """Return a time that no order is faster than: a worker waits for its first input, and computes all its actions."""
    forwards = [seconds[Kind.FORWARD] for seconds in problem.seconds]
    arrivals = [sum(forwards[:j]) + sum(problem.hops[: j + 1]) for j in range(problem.stages)]
    m, stops = problem.microbatches, problem.stops
    again = [sum(stops[j] * problem.seconds[j][Kind.RECOMPUTE] for j in own) for own in problem.owned]
    busy = zip(problem.owned, problem.loads, again, strict=True)
    return max(arrivals[own[0]] + m * load + recomputed for own, load, recomputed in busy)


def _find_named_orders(coded: Coded) -> Iterator[Order]:
    """Yield the named schedules that suit the placement and fit."""
    problem = coded.problem
    split = [j for j, is_split in enumerate(problem.split) if is_split]
    for name in SCHEDULES:
        try:
            own = lanes(name, problem.microbatches, problem.placement, problem.stops, split)
        except ValueError:  # it needs a different placement
            continue
        order = coded.encode(own)
        if coded.fits(order):
            yield order


def _select_best(
    coded: Coded, small: Coded, ways: Sequence[Way], made: Callable[[Coded, Way], Order], kept: int
) -> list[Order]:
    """Return the orders of the best ways that fit, compared on fewer micro-batches.

    Args:
        small: the problem with fewer micro-batches.
        made: makes an order of all actions.
        kept: the most orders to return.
    """
    more = coded.problem.microbatches - small.problem.microbatches
    ranked = list[tuple[float, int]]()
    for number, way in enumerate(ways):
        order = made(small, way)
        found = small.replay(order)
        if found is not None and small.fits(order):
            ranked.append((found[0] + more * small.period(found[1]), number))
    orders = (made(coded, ways[number]) for _, number in sorted(ranked)[:kept])
    return [order for order in orders if coded.fits(order)]


def _with_fewer(problem: Problem) -> Problem:
    """Return the problem with just enough micro-batches to show how an order goes on."""
    m = min(problem.microbatches, 8 + 2 * problem.workers)
    # The last micro-batches are the ones that are not checkpointed, if some are.
    stops = (max(0, min(stop, m - (problem.microbatches - stop))) for stop in problem.stops)
    return replace(problem, microbatches=m, stops=tuple(stops))


_UNITS = dict.fromkeys(Kind, 1.0) | {Kind.BACKWARD: 2.0}


def _expect_one_each(stages: int, **arguments: Sequence[object] | None) -> None:
    for name, given in arguments.items():
        if given is not None and len(given) != stages:
            raise ValueError(f"{name}: expected one per stage ({stages}), got {len(given)}")


def _expect_costs(seconds: KindSeconds, hops: Sequence[float], whole: Sequence[int], bare: Sequence[int]) -> None:
    for j, durations in enumerate(seconds):
        for kind in SLOTS:
            if kind not in durations:
                raise ValueError(
                    f"seconds: expected the duration of a {kind.label} of stage {j}, got {dict(durations)}"
                )
    found = {"seconds": [each[kind] for each in seconds for kind in SLOTS], "hops": hops}
    for name, numbers in {**found, "activation_bytes": whole, "boundary_bytes": bare}.items():
        for number in numbers:
            if not (isfinite(number) and number >= 0):
                raise ValueError(f"{name}: expected finite, non-negative numbers, got {number!r}")


def _limits(memory: Limits, numbers: Sequence[int]) -> tuple[float | None, ...]:
    """Return the limit of each worker that has stages."""
    if memory is None or isinstance(memory, (int, float)):
        return (memory,) * len(numbers)
    if len(memory) != numbers[-1] + 1:
        raise ValueError(f"memory: expected one number, or one per worker ({numbers[-1] + 1}), got {len(memory)}")
    return tuple(memory[number] for number in numbers)


def _expect_room(problem: Problem, numbers: Sequence[int]) -> None:
    """Raise ValueError unless each worker has memory for one micro-batch."""
    for r, (number, limit) in enumerate(zip(numbers, problem.limits, strict=True)):
        least = least_bytes(problem, r)
        if limit is not None and limit < least:
            raise ValueError(
                f"memory: worker {number} needs at least {least} for one micro-batch at a time, got {limit}; put fewer "
                "layers on it, checkpoint its stages, or use smaller micro-batches"
            )
