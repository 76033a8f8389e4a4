"""Lay the actions of all workers in the order of time, each worker by a rule that says which action is most urgent.

Whatever the rule, memory cannot block the workers forever: a forward is only admitted if all micro-batches in flight
could still be finished one after the other, the oldest first (the banker's algorithm).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ._coded import B, Coded, F, I, Order, R, W
from ._problem import Problem

_NEVER = float("inf")
_OVERDUE, _FIRST, _SECOND, _EARLY, _LATE = 0.0, 2.0, 4.0, 6.0, 8.0
"""The keys of actions, a smaller one being more urgent: weight gradients that are too late, the two kinds that other
stages wait for, recomputations before their gradient is on its way, and weight gradients. Stages add less than 1."""


class Rule(NamedTuple):
    """What a worker does if it has a choice. Backwards and forwards are more urgent than weight gradients.

    Attributes:
        ahead: how many forwards a worker runs in advance, as a multiple of what 1F1B needs to bridge the time until the
            first gradient.
        lag: the number of weight gradients that may be late; one more is most urgent.
        patience: a worker waits for a more urgent action if it can start within this fraction of the duration of the
            action that would run instead.
        forward_first: whether forwards are more urgent than backwards.
    """

    ahead: float = 1.0
    lag: float = float("inf")
    patience: float = 0.0
    forward_first: bool = False


class Demand(NamedTuple):
    """What a micro-batch holds on a worker at a point of its way, and what it needs in addition to finish."""

    bytes: int
    more_bytes: int
    cells: int
    more_cells: int


def compute_demands(problem: Problem, worker: int, microbatch: int) -> list[Demand]:
    """Return the demand before each action of a micro-batch on ``worker``, and after the last.

    The actions are the forwards of its stages, then their recomputations and backwards in reverse order. Weight
    gradients do not count, because they can be computed at any time.
    """
    own, held = problem.owned[worker], [(0, 0)]
    changes = [(problem.first_bytes(j, microbatch), 1) for j in own]
    for j in reversed(own):
        if microbatch < problem.stops[j]:
            changes.append((problem.whole[j] - problem.bare[j], 0))
        changes.append((-problem.whole[j], -1))
    for size, cells in changes:
        held.append((held[-1][0] + size, held[-1][1] + cells))
    later = [(max(each for each, _ in held[k:]), max(each for _, each in held[k:])) for k in range(len(held))]
    return [
        Demand(size, most - size, cells, most_cells - cells)
        for (size, cells), (most, most_cells) in zip(held, later, strict=True)
    ]


def least_bytes(problem: Problem, worker: int) -> int:
    """Return the bytes that a worker needs for one micro-batch at a time."""
    return max(demands[0].more_bytes for demands in _demands(problem, worker))


def _demands(problem: Problem, worker: int) -> list[list[Demand]]:
    """Return the demands of each micro-batch; those below the same stops share a list."""
    changes = {0, *(problem.stops[j] for j in problem.owned[worker])}
    found = list[list[Demand]]()
    for i in range(problem.microbatches):
        found.append(compute_demands(problem, worker, i) if i in changes else found[-1])
    return found


def lay(coded: Coded, rule: Rule) -> Order:
    """Lay all actions by ``rule``.

    Args:
        coded: the actions of a problem, each of whose limits is at least :func:`least_bytes`.
        rule: what is more urgent.

    Returns:
        An order in which no worker exceeds its limit.
    """
    problem, took, outbox, hop = coded.problem, coded.took, coded.outbox, coded.hop
    arrivals = coded.unknown()
    workers = [_Worker(coded, rule, r, arrivals) for r in range(problem.workers)]
    events = [(0.0, r) for r in range(problem.workers)]
    heapify(events)
    while events:
        now, r = heappop(events)
        worker = workers[r]
        if worker.clock > now:  # busy; its end is an event too
            continue
        choice = worker.choose(now)
        if choice is None:  # the arrival of an input is an event
            continue
        start, code = choice
        worker.take(code)
        worker.clock = end = start + took[code]
        heappush(events, (end, r))
        if (receiver := coded.receiver[code]) >= 0:
            arrivals[outbox[code]] = arrival = end + hop[code]
            heappush(events, (arrival, receiver))
    order = [worker.line for worker in workers]
    assert sum(map(len, order)) == problem.actions
    return order


class _Stage:
    """The next actions of a stage, which runs each kind in the order of micro-batches, and how urgent they are.

    Attributes:
        forward, recompute, backward, weight: the number of the next action of each kind.
        last: the number of the last forward.
        stop: the number of the first backward that needs no recomputation.
        is_recomputed: whether the micro-batch of the next backward is recomputed.
        ahead: the number of cells that wait for their backward.
        done: the number of backwards, without those for the weights.
        late: the number of weight gradients that are not computed, although their input gradients are.
    """

    __slots__ = (
        "ahead", "backward", "backward_key", "done", "forward", "forward_key", "is_recomputed", "last", "late",
        "recompute", "stop", "weight",
    )  # fmt: skip

    def __init__(self, coded: Coded, rule: Rule, index: int) -> None:
        problem = coded.problem
        m, n = problem.microbatches, problem.stages
        self.ahead = self.done = self.late = 0
        self.is_recomputed = False
        self.forward, self.recompute, self.weight = ((slot * n + index) * m for slot in (F, R, W))
        self.backward = ((I if problem.split[index] else B) * n + index) * m
        self.last = self.forward + m - 1
        self.stop = self.backward + problem.stops[index]
        # Among forwards, those of later stages are more urgent, and among backwards, those of earlier stages.
        self.forward_key = (_FIRST if rule.forward_first else _SECOND) + (n - 1 - index) / n
        self.backward_key = (_SECOND if rule.forward_first else _FIRST) + index / n


class _Worker:
    """What a worker has done, what it holds, and what it does next.

    Attributes:
        clock: the time when it is free.
        line: the numbers of its actions.
    """

    def __init__(self, coded: Coded, rule: Rule, number: int, arrivals: list[float]) -> None:
        problem = coded.problem
        self.clock, self.line = 0.0, list[int]()
        self._coded, self._rule, self._arrivals = coded, rule, arrivals
        self._m, self._n = problem.microbatches, problem.stages
        self._stages = {j: _Stage(coded, rule, j) for j in problem.owned[number]}
        self._all = [*self._stages.values()]
        self._limit = problem.limits[number]
        self._most_cells = _cells_ahead(problem, rule, number)
        # The bytes that it holds, the part of them that no late weight gradient could free, and the cells ahead.
        self._held = self._bound = self._cells = self._late = 0
        self._demands = _demands(problem, number)
        self._more_bytes = max(demands[0].more_bytes for demands in self._demands)
        self._at = [0] * self._m  # how many actions each micro-batch has had, without weight gradients

    def choose(self, now: float) -> tuple[float, int] | None:
        """Return when to start which action, or None if the worker has to wait for an input."""
        best, least, later = -1, _NEVER, []
        for key, arrival, code in self._candidates():
            if arrival > now:
                later.append((arrival, key, code))
            elif key < least:
                best, least = code, key
        if best >= 0 and later and self._rule.patience:
            until = now + self._rule.patience * self._coded.took[best]
            # Keys of different kinds differ by at least one.
            sooner = [each for each in later if each[0] < until and each[1] < least - 1]
            if sooner:
                arrival, _, code = min(sooner)
                return arrival, code
        return None if best < 0 else (now, best)

    def _candidates(self) -> list[tuple[float, float, int]]:
        """Return the key, the arrival of the input, and the number of each action that memory and the rule allow."""
        arrivals, inbox, found = self._arrivals, self._coded.inbox, []
        for stage in self._all:
            if stage.ahead:
                code = stage.backward
                arrival = arrivals[inbox[code]]
                if code < stage.stop and not stage.is_recomputed:
                    if self._is_next(stage) and self._admits(stage.recompute):
                        # It waits for nothing, but is only urgent once its gradient is on the way.
                        found.append((stage.backward_key if arrival >= 0 else _EARLY, 0.0, stage.recompute))
                elif arrival >= 0:
                    found.append((stage.backward_key, arrival, code))
            if stage.late:
                found.append((_OVERDUE if self._late > self._rule.lag else _LATE, 0.0, stage.weight))
            code = stage.forward
            if code <= stage.last and arrivals[inbox[code]] >= 0 and self._admits(code):
                found.append((stage.forward_key, arrivals[inbox[code]], code))
        return found

    def _is_next(self, stage: _Stage) -> bool:
        """Return whether the worker's later stages are done with the micro-batch that ``stage`` would recompute."""
        return all(later.done > stage.done for later in self._all[self._all.index(stage) + 1 :])

    def _admits(self, code: int) -> bool:
        """Return whether the action fits into memory, and all micro-batches in flight could then be finished."""
        limit, change = self._limit, self._coded.change[code]
        cells = self._cells + (code < self._m * self._n)
        if cells > self._most_cells or (limit is not None and self._held + change > limit):
            return False
        # Enough for any state, and most of the time it is fulfilled.
        is_roomy = limit is None or self._bound + change + self._more_bytes <= limit
        return (is_roomy and cells + len(self._all) <= self._most_cells) or self._finishes(code % self._m)

    def _finishes(self, microbatch: int) -> bool:
        """Return whether all micro-batches can be finished, the oldest first, after the next action of one of them."""
        first, limit, size, cells = self._all[0], self._limit, 0, 0
        newest = min(first.forward, first.last) % self._m
        for i in range(newest, first.done - 1, -1):
            held, more, own, further = self._demands[i][self._at[i] + (i == microbatch)]
            size += held
            cells += own
            if cells + further > self._most_cells or (limit is not None and size + more > limit):
                return False
        return True

    def take(self, code: int) -> None:
        """Note that the action has been laid."""
        slot, j = divmod(code // self._m, self._n)
        stage, change = self._stages[j], self._coded.change[code]
        self.line.append(code)
        self._held += change
        if slot == W:
            stage.weight += 1
            stage.late -= 1
            self._late -= 1
            return
        self._at[code % self._m] += 1
        if slot == F:
            stage.forward += 1
            stage.ahead += 1
            self._cells += 1
        elif slot == R:
            stage.recompute += 1
            stage.is_recomputed = True
        else:
            self._end_backward(stage, is_split=slot == I)
            change = -self._coded.problem.whole[j]
        self._bound += change

    def _end_backward(self, stage: _Stage, *, is_split: bool) -> None:
        stage.backward += 1
        stage.done += 1
        stage.ahead -= 1
        stage.late += is_split
        stage.is_recomputed = False
        self._cells -= 1
        self._late += is_split


def _cells_ahead(problem: Problem, rule: Rule, worker: int) -> int:
    """Return the most cells that a worker may have between forward and backward; at least one of each stage."""
    own, n = problem.owned[worker], problem.stages
    # With a single stage, 1F1B holds n - j; with several, interleaved zero bubble and ZB-V hold n.
    needed = 1 + rule.ahead * (n - 1 - own[0]) if len(own) == 1 else rule.ahead * n
    return max(len(own), round(min(needed, problem.microbatches * n)))
