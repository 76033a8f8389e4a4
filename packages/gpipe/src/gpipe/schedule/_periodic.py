"""Orders in which every micro-batch does the same, a period after the previous one.

The actions of one micro-batch are placed as early as possible in the free time of their workers, counted modulo the
period, as compilers pipeline loops (iterative modulo scheduling, Rau 1994). As each micro-batch passes the stages
without long waits, its activations are held for a short time. With two stages per worker in a V, and costs that are
all equal, these are the building blocks of V-Min and V-Half, which hold a third and a half of the activations of 1F1B
(Pipeline Parallelism with Controllable Memory, arXiv 2405.15362).
"""

from __future__ import annotations

from typing import NamedTuple

from ._actions import Kind
from ._coded import SLOTS, B, Coded, F, I, Order, R, W
from ._problem import Problem


class Pace(NamedTuple):
    """The parameters of a periodic order.

    Attributes:
        period: the time from one micro-batch to the next, as a multiple of the time that the busiest worker needs.
        stretch: additional time between a stage and the next, in forwards and in backwards, as a multiple of the mean
            duration of an action. Longer lifespans need more memory, but leave more freedom to other actions.
        is_even: whether all actions count as equally long, which wastes less time between them.
    """

    period: float
    stretch: tuple[float, float] = (0.0, 0.0)
    is_even: bool = False


class _Calendar:
    """The time of a worker that is taken, modulo the period."""

    def __init__(self, period: float) -> None:
        self.period = period
        self.taken: list[tuple[float, float]] = []

    def place(self, earliest: float, duration: float) -> float:
        """Take ``duration`` as soon as possible after ``earliest``, and return its start.

        If no gap is long enough, it is ``earliest``: a replay of the order delays what overlaps.
        """
        start = earliest
        while start < earliest + self.period:
            end = self._end_of_conflict(start, duration)
            if end is None:
                break
            start = end
        else:
            start = earliest
        self.taken.append((start % self.period, duration))
        return start

    def _end_of_conflict(self, start: float, duration: float) -> float | None:
        """Return the end of a taken span that overlaps with one of ``duration`` from ``start``."""
        period, tiny = self.period, 1e-9 * self.period
        for taken, length in self.taken:
            # How long after the start of the taken span this one starts.
            behind = (start - taken) % period
            if period - behind < tiny:
                behind = 0.0
            if behind < length - tiny:
                return start + length - behind
            if period - behind < duration - tiny:
                return start + period - behind + length
        return None


def periodic(coded: Coded, pace: Pace) -> Order:
    """Return the order of all actions if each micro-batch follows the previous one after a period."""
    problem = coded.problem
    period, placed = _place_actions(problem, pace)
    m, n = problem.microbatches, problem.stages
    lines: list[list[tuple[float, int, int, int]]] = [[] for _ in range(problem.workers)]
    for rank, (start, slot, j) in enumerate(placed):
        line, first = lines[problem.placement[j]], (slot * n + j) * m
        count = min(m, problem.stops[j]) if slot == R else m
        line += [(start + period * i, i, rank, first + i) for i in range(count)]
    return [[code for *_, code in sorted(line)] for line in lines]


def _place_actions(problem: Problem, pace: Pace) -> tuple[float, list[tuple[float, int, int]]]:
    """Return the period, and the start, slot and stage of each action of micro-batch 0, sorted by dependencies."""
    durations, mean = _durations(problem, pace)
    loads = [sum(sum(durations[j].values()) for j in own) for own in problem.owned]
    period = max(max(loads) * pace.period, 1e-9)
    calendars = [_Calendar(period) for _ in range(problem.workers)]
    onward, back = (each * mean for each in pace.stretch)
    placed, ends, ready = list[tuple[float, int, int]](), list[float](), 0.0
    for j in range(problem.stages):
        took = durations[j][F]
        start = calendars[problem.placement[j]].place(ready, took)
        placed.append((start, F, j))
        ends.append(start + took)
        ready = ends[-1] + onward + _hop(problem, j + 1)
    ready = ends[-1]
    late = list[tuple[float, int]]()
    for j in reversed(range(problem.stages)):
        own, calendar = durations[j], calendars[problem.placement[j]]
        slot = I if problem.split[j] else B
        # A recomputation ends when the gradient arrives, if the forward ends early enough.
        start = calendar.place(max(ready - own[R], ends[j]), own[R] + own[slot])
        # The maximum, because a rounding error must not put the backward before that of the next stage.
        begin = max(start + own[R], ready)
        placed += [(start, R, j), (begin, slot, j)]
        end = begin + own[slot]
        ready = end + back + _hop(problem, j)
        if problem.split[j]:
            late.append((end, j))
    # Weight gradients come last, so that they take only time that no input gradient needs.
    placed += [(calendars[problem.placement[j]].place(end, durations[j][W]), W, j) for end, j in late]
    return period, placed


def _hop(problem: Problem, stage: int) -> float:
    return problem.hops[stage] if stage < problem.stages else 0.0


def _durations(problem: Problem, pace: Pace) -> tuple[list[dict[int, float]], float]:
    """Return the durations of each stage by slot, and their mean."""
    found, each = [dict.fromkeys(range(len(SLOTS)), 0.0) for _ in range(problem.stages)], list[float]()
    for j, own in enumerate(found):
        kinds = problem.kinds(j)
        # All micro-batches do the same in a periodic order, so the majority decides whether it recomputes.
        if 2 * problem.stops[j] > problem.microbatches:
            kinds += (Kind.RECOMPUTE,)
        own.update((SLOTS.index(kind), problem.seconds[j][kind]) for kind in kinds)
        each += [problem.seconds[j][kind] for kind in kinds]
    mean = sum(each) / max(1, len(each))
    if pace.is_even:
        found = [{slot: took and (2 * mean if slot == B else mean) for slot, took in own.items()} for own in found]
    return found, mean
