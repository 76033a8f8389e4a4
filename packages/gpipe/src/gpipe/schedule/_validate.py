"""The conditions under which a schedule trains all micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from ._actions import Action, Kind, Program, Step
from ._replay import replay
from ._schedule import Schedule


def validate(schedule: Schedule, microbatches: int, placement: Sequence[int]) -> None:
    """Raise ValueError, naming the action, unless ``schedule`` trains ``microbatches`` micro-batches on these stages.

    Every stage does each forward once, and after it either one backward or one backward for the inputs and then one for
    the weights, with at most one recomputation before; and the workers never wait for each other forever.

    Args:
        schedule: the program of each stage.
        microbatches: the number of micro-batches.
        placement: the worker of each stage.

    Raises:
        ValueError: it does not; the message names the first action that is missing or in the wrong place.
    """
    if len(schedule) != len(placement):
        raise ValueError(f"the schedule is for {len(schedule)} stages, the pipe has {len(placement)}")
    for j, program in enumerate(schedule):
        seen: set[Action] = set()
        for action in program:
            _expect_in_place(Step(j, action), seen, microbatches)
            seen.add(action)
        for i in range(microbatches):
            _expect_complete(j, i, seen)
    replay(schedule.on(placement))


_AFTER: dict[Kind, tuple[Kind, ...]] = {
    Kind.FORWARD: (),
    Kind.RECOMPUTE: (Kind.FORWARD,),
    Kind.BACKWARD: (Kind.FORWARD,),
    Kind.BACKWARD_INPUT: (Kind.FORWARD,),
    Kind.BACKWARD_WEIGHT: (Kind.BACKWARD_INPUT,),
}
_INSTEAD: dict[Kind, Kind] = {Kind.BACKWARD: Kind.BACKWARD_INPUT, Kind.BACKWARD_INPUT: Kind.BACKWARD}


def _expect_in_place(step: Step, seen: set[Action], microbatches: int) -> None:
    kind, i = step.action
    if i >= microbatches:
        raise ValueError(f"{step} is of micro-batch {i}, but there are {microbatches}, counted from 0")
    if step.action in seen:
        raise ValueError(f"{step} occurs twice")
    for before in _AFTER[kind]:
        if Action(before, i) not in seen:
            raise ValueError(f"{step} comes before {Step(step.stage, Action(before, i))}, which it needs")
    if kind in _INSTEAD and Action(_INSTEAD[kind], i) in seen:
        raise ValueError(f"{step} comes after {Step(step.stage, Action(_INSTEAD[kind], i))}, which does the same")
    if kind == Kind.RECOMPUTE and not seen.isdisjoint({Action(Kind.BACKWARD, i), Action(Kind.BACKWARD_INPUT, i)}):
        raise ValueError(f"{step} comes after the backward that it is for")


def _expect_complete(j: int, i: int, seen: set[Action]) -> None:
    if Action(Kind.FORWARD, i) not in seen:
        raise ValueError(f"{Step(j, Action(Kind.FORWARD, i))} is missing")
    if Action(Kind.BACKWARD, i) not in seen:
        kind: Kind = Kind.BACKWARD_WEIGHT if Action(Kind.BACKWARD_INPUT, i) in seen else Kind.BACKWARD
        if Action(kind, i) not in seen:
            raise ValueError(f"{Step(j, Action(kind, i))} is missing")


def in_flight(program: Program) -> int:
    """The largest number of micro-batches for which a stage with this program holds activations at the same time.

    Args:
        program: the actions of a stage.

    Returns:
        A number of micro-batches.
    """
    held = most = 0
    for kind, _ in program:
        # After a backward for the inputs, the one for the weights still reads some of the activations.
        held += (kind == Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
        most = max(most, held)
    return most
