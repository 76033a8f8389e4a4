"""What a worker holds from which step to which, and the smallest number of buffers for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from ._actions import Action, Kind, Step, Walk, requirement
from ._replay import replay
from ._schedule import Schedule

Held = Literal["activation", "input", "gradient"]


class Lifetime(NamedTuple):
    """The steps of a worker during which it holds something of a micro-batch.

    Attributes:
        held: ``"activation"`` is what the backward of the stage reads, held from the forward on, or from the
            recomputation if there is one; ``"input"`` is what the stage before sent, and ``"gradient"`` what the one
            after sent.
        stage: the stage that holds it.
        microbatch: the number of the micro-batch.
        first: the first step of the worker during which it may exist, counted from 0 in the order of its steps. What
            other workers send cannot arrive before this step, for any durations of steps.
        last: the step that reads it last.
    """

    held: Held
    stage: int
    microbatch: int
    first: int
    last: int


def lifetimes(schedule: Schedule, placement: Sequence[int]) -> tuple[tuple[Lifetime, ...], ...]:
    """What each worker holds, with the first and the last of its steps during which it is held.

    This depends only on the order of the steps, not on their durations. The computation takes time proportional to the
    number of steps times that of workers.

    Args:
        schedule: any schedule, also one of forwards alone.
        placement: the worker of each stage.

    Returns:
        For each worker its lifetimes, in the order in which they begin.

    Raises:
        ValueError: the workers wait for each other forever.

    >>> from gpipe.schedule import one_forward_one_backward
    >>> for lifetime in lifetimes(one_forward_one_backward(2, 2), [0, 1])[1]:  # F0 B0 F1 B1
    ...     print(*lifetime)
    input 1 0 0 1
    activation 1 0 0 1
    input 1 1 0 3
    activation 1 1 2 3
    """
    walk = schedule.on(placement)
    arrivals = _arrivals(walk, placement)
    return tuple(tuple(sorted(_lifetimes(steps, arrivals), key=lambda each: each.first)) for steps in walk)


def slots(lifetimes: Iterable[Lifetime]) -> dict[Lifetime, int]:
    """Assign a buffer to each of ``lifetimes``. Lifetimes that overlap have different buffers; their number is minimal.

    The number of buffers is the largest number of lifetimes that overlap. Pass only lifetimes that may share buffers,
    such as the activations of stages of the same size.

    Args:
        lifetimes: all lifetimes of one worker, or some of them.

    Returns:
        For each lifetime the number of its buffer, counted from 0.

    >>> from gpipe.schedule import one_forward_one_backward
    >>> first, last = lifetimes(one_forward_one_backward(8, 2), [0, 1])
    >>> [1 + max(slots(each for each in worker if each.held == "activation").values()) for worker in (first, last)]
    [2, 1]
    """
    # Greedily in the order of their beginnings, which is optimal for intervals.
    found: dict[Lifetime, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for each in sorted(lifetimes, key=lambda each: each.first):
        while busy and busy[0][0] < each.first:
            heappush(free, heappop(busy)[1])
        found[each] = heappop(free) if free else len(busy)
        heappush(busy, (each.last, found[each]))
    return found


def _lifetimes(steps: Sequence[Step], arrivals: dict[Step, int]) -> Iterator[Lifetime]:
    of_each: dict[tuple[int, int], dict[Kind, int]] = {}
    for number, (stage, (kind, i)) in enumerate(steps):
        of_each.setdefault((stage, i), {})[kind] = number
    for (stage, i), numbers in of_each.items():
        last = max(numbers.values())
        for kind in numbers:
            step = Step(stage, Action(kind, i))
            if step in arrivals:
                yield Lifetime("input" if kind == Kind.FORWARD else "gradient", stage, i, arrivals[step], last)
        yield Lifetime("activation", stage, i, numbers.get(Kind.RECOMPUTE, min(numbers.values())), last)


def _arrivals(walk: Walk, placement: Sequence[int]) -> dict[Step, int]:
    """For each step that needs the result of another one, the first step of its worker during which that may exist."""
    arrivals: dict[Step, int] = {}
    # The number of steps of each worker that have certainly ended before the next step of this worker begins; and what
    # is known of that at the end of a step, which is passed on with what it sends.
    ended = [[0] * len(walk) for _ in walk]
    sent: dict[Step, list[int]] = {}
    for step in replay(walk):
        worker = placement[step.stage]
        for needed in requirement(step):
            if needed in sent:
                known = sent.pop(needed)
                # On its own worker the result exists from the step on that computes it.
                arrivals[step] = known[worker] - (placement[needed.stage] == worker)
                ended[worker] = list(map(max, ended[worker], known))
        ended[worker][worker] += 1
        if step.action.kind not in (Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT):
            sent[step] = ended[worker].copy()
    return arrivals
