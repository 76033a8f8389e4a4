"""Any schedule at all: the steps of a training step in some order that respects what they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, product

from hypothesis import strategies as st

from gpipe.schedule import Action, Schedule, Step

CHOICES = st.lists(st.integers(0, 15), max_size=40).map(tuple)
"""What :func:`some_schedule` chooses by."""

Needs = dict[Step, set[Step]]
"""For each step, the steps that come before it."""


def some_schedule(
    choices: Sequence[int],
    microbatches: int,
    placement: Sequence[int],
    checkpoint_stop: int,
    *,
    in_order: bool = False,
) -> Schedule:
    """A valid schedule for stages on the workers of ``placement``.

    Args:
        choices: used in turn for every decision: which backwards are split, which recomputations are written down, and
            which of the steps that could come next does. Any numbers do.
        in_order: whether a stage takes the forwards in the order of the micro-batches.
    """
    decisions = cycle(choices or [0])
    needs = dict(_needs(decisions, microbatches, len(placement), checkpoint_stop))
    if in_order:
        for i, j in product(range(1, microbatches), range(len(placement))):
            needs[Step(j, Action("forward", i))].add(Step(j, Action("forward", i - 1)))
    order = list(_ordered(decisions, needs))
    programs = [[step.action for step in order if step.stage == j] for j in range(len(placement))]
    workers = range(max(placement, default=-1) + 1)
    walk = tuple(tuple(step for step in order if placement[step.stage] == worker) for worker in workers)
    return Schedule(programs, walk)


def _needs(decisions: Iterator[int], m: int, n: int, stop: int) -> Iterator[tuple[Step, set[Step]]]:
    for i in range(m):
        later: set[Step] = set()
        for j in reversed(range(n)):
            forward, recompute = Step(j, Action("forward", i)), Step(j, Action("recompute", i))
            splits, says = divmod(next(decisions) % 4, 2)
            backward = Step(j, Action("backward_input" if splits else "backward", i))
            yield forward, {Step(j - 1, forward.action)} if j else set()
            if says and i < stop:
                yield recompute, {forward}
            yield backward, {recompute if says and i < stop else forward} | later
            if splits:
                yield Step(j, Action("backward_weight", i)), {backward}
            later = {backward}


def _ordered(decisions: Iterator[int], needs: Needs) -> Iterator[Step]:
    done: set[Step] = set()
    while needs:
        ready = sorted(step for step, before in needs.items() if before <= done)
        step = ready[next(decisions) % len(ready)]
        del needs[step]
        done.add(step)
        yield step
