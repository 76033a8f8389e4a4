"""The conditions under which a schedule trains all micro-batches."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ._actions import LOSS_OF_ALL, Action, Kind, Program, Step
from ._replay import replay
from ._schedule import Schedule

_TRAINED = re.compile("FR?(B|IW)")
"""The letters of what a stage does for a micro-batch."""


def validate(schedule: Schedule, microbatches: int, placement: Sequence[int]) -> None:
    """Raise ValueError, naming the actions, unless ``schedule`` trains ``microbatches`` micro-batches on these stages.

    Every stage does each forward once, and after it either one backward or one backward for the inputs and then one for
    the weights, with at most one recomputation before. The last stage may compute the loss of the whole mini-batch
    once, behind all forwards and before all backwards.

    Args:
        schedule: the program of each stage.
        microbatches: the number of micro-batches.
        placement: the worker of each stage.

    Raises:
        ValueError: a stage does something else for a micro-batch, the loss is not where it has to be, or the workers
            wait for each other forever.
    """
    if len(schedule) != len(placement):
        raise ValueError(f"the schedule is for {len(schedule)} stages, the pipe has {len(placement)}")
    for j, program in enumerate(schedule):
        # The order of micro-batches is free, and deadlocks are found by the replay: what is left is a word for each.
        done: dict[int, list[Action]] = {i: [] for i in range(microbatches)}
        _expect_loss(schedule, j)
        for action in program:
            if action.kind == Kind.LOSS:
                continue
            i = action.microbatch
            if i not in done:
                raise ValueError(
                    f"{Step(j, action)} is of micro-batch {i}, but there are {microbatches}, counted from 0"
                )
            done[i].append(action)
        for i, actions in done.items():
            if _TRAINED.fullmatch("".join(Kind(kind).letter for kind, _ in actions)) is None:
                raise ValueError(
                    f"stage {j} does {' '.join(map(str, actions)) or 'nothing'} for micro-batch {i}; expected F{i}, "
                    f"perhaps R{i}, and then B{i}, or I{i} and W{i}"
                )
    replay(schedule.on(placement))


def _expect_loss(schedule: Schedule, stage: int) -> None:
    """Raise ValueError if ``stage`` computes the loss of the whole mini-batch where that cannot be."""
    program = schedule[stage]
    if not any(kind == Kind.LOSS for kind, _ in program):
        return
    others = Schedule([*schedule[:stage], [action for action in program if action.kind != Kind.LOSS]])
    if stage != len(schedule) - 1 or others.with_loss()[stage] != program:
        raise ValueError(
            f"stage {stage} does {' '.join(map(str, program))}; {LOSS_OF_ALL}, the loss of the whole mini-batch, is "
            "computed once, by the last stage, behind its last forward and before its first backward"
        )


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
