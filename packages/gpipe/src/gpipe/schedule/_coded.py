"""Actions as integers, so that a search can replay many orders of them in a second.

The number of an action is ``(slot * n + stage) * m + microbatch``, where ``slot`` is the index of its kind in
:data:`SLOTS`. An **order** has a list of these numbers for each worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, product

from ._actions import Action, Kind, Step, WorkerSteps
from ._problem import Problem
from ._replay import Lane

SLOTS = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
F, R, B, I, W = range(len(SLOTS))  # noqa: E741

_SLOT_OF = {kind: slot for slot, kind in enumerate(SLOTS)}

Order = list[list[int]]
"""The actions of each worker, in order, as numbers."""


class Coded:
    """Tables of a problem that are indexed by the numbers of actions.

    Attributes:
        took: the duration of each action.
        change: by how many bytes it changes what its worker holds.
        inbox, outbox: the index of the arrival that it waits for, and of the one that it sends.
        hop: the transfer time of what it sends.
        receiver: the worker that it sends to; -1 if no stage waits for it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        m, n = problem.microbatches, problem.stages
        self._unknown = [-1.0] * (2 * n * m) + [0.0, 0.0]
        # The input of the first stage, and the gradient of the loss, are available from the start.
        self._unknown[:m] = self._unknown[(2 * n - 1) * m : 2 * n * m] = [0.0] * m
        there, nowhere = 2 * n * m, 2 * n * m + 1
        self.took, self.hop = list[float](), list[float]()
        self.change, self.receiver = list[int](), list[int]()
        self.inbox, self.outbox = list[int](), list[int]()
        for (slot, kind), j in product(enumerate(SLOTS), range(n)):
            to = _next_stage(slot, j, n)
            self.took += [problem.seconds[j][kind]] * m
            self.change += [problem.changes(j, i)[kind] for i in range(m)]
            self.hop += [0.0 if to is None else problem.hops[max(j, to)]] * m
            self.receiver += [-1 if to is None else problem.placement[to]] * m
            self.inbox += [there] * m if slot in (R, W) else _arrivals(slot, j, m, n)
            self.outbox += [nowhere] * m if to is None else _arrivals(slot, to, m, n)

    def unknown(self) -> list[float]:
        """Return the arrival of each input, negative until it is known."""
        return self._unknown.copy()

    def encode(self, lanes: Iterable[Lane]) -> Order:
        """Return the order of actions that the workers run in ``lanes``."""
        m, n = self.problem.microbatches, self.problem.stages
        return [[(_SLOT_OF[kind] * n + j) * m + i for j, (kind, i) in lane] for lane in lanes]

    def worker_steps(self, order: Order) -> WorkerSteps:
        """Return the order as worker steps; the inverse of :meth:`encode`."""
        m, n = self.problem.microbatches, self.problem.stages
        return tuple(
            tuple(Step(code // m % n, Action(SLOTS[code // (m * n)], code % m)) for code in line) for line in order
        )

    def replay(self, order: Order) -> tuple[float, list[float]] | None:
        """Return the makespan and the start of each action by its number; None if the workers wait forever.

        Same as :func:`gpipe.schedule.replay`, in a sixth of the time.
        """
        arrivals, starts = self.unknown(), [0.0] * len(self.took)
        took, inbox, outbox, hop = self.took, self.inbox, self.outbox, self.hop
        clocks, at, lengths = [0.0] * len(order), [0] * len(order), [*map(len, order)]
        workers = list(range(len(order)))
        left, before = sum(lengths), -1
        while left and left != before:
            before = left
            for r in workers:
                line, k, clock = order[r], at[r], clocks[r]
                first, length = k, lengths[r]
                while k < length:
                    code = line[k]
                    arrival = arrivals[inbox[code]]
                    if arrival < 0:
                        break
                    if arrival > clock:
                        clock = arrival
                    starts[code] = clock
                    clock += took[code]
                    arrivals[outbox[code]] = clock + hop[code]
                    k += 1
                left -= k - first
                at[r], clocks[r] = k, clock
            workers.reverse()
        return None if left else (max(clocks, default=0.0), starts)

    def makespan(self, order: Order) -> float:
        """Return the makespan of an order, infinity if the workers wait forever."""
        found = self.replay(order)
        return math.inf if found is None else found[0]

    def score(self, order: Order) -> tuple[float, int]:
        """Return the makespan, and the sum of what workers hold at most, which decides between equally fast orders."""
        return self.makespan(order), sum(map(self._peak, order))

    def period(self, starts: Sequence[float]) -> float:
        """Return the time from one micro-batch to the next in the middle of a replay, at least the largest load."""
        m, n = self.problem.microbatches, self.problem.stages
        slot = I if self.problem.split[-1] else B
        first, last = m // 4, 3 * m // 4
        backwards = starts[(slot * n + n - 1) * m :]
        passed = (backwards[last] - backwards[first]) / max(1, last - first)
        return max(passed, *self.problem.loads)

    def _peak(self, line: Sequence[int]) -> int:
        return max(accumulate(map(self.change.__getitem__, line)), default=0)

    def fits(self, order: Order) -> bool:
        """Return whether no worker holds more than its limit."""
        return all(self.fits_on(r, line) for r, line in enumerate(order))

    def fits_on(self, worker: int, line: Sequence[int]) -> bool:
        """Return whether the worker holds no more than its limit if it runs ``line``."""
        limit = self.problem.limits[worker]
        return limit is None or self._peak(line) <= limit


def _next_stage(slot: int, stage: int, stages: int) -> int | None:
    """Return the stage that waits for the result of an action, if there is one."""
    if slot == F:
        return stage + 1 if stage + 1 < stages else None
    return stage - 1 if slot in (B, I) and stage else None


def _arrivals(slot: int, stage: int, m: int, n: int) -> range:
    """Return the indices of the inputs that a stage's forwards or backwards wait for, one per micro-batch."""
    first = (stage if slot == F else n + stage) * m
    return range(first, first + m)
