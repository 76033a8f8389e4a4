"""Check that a schedule trains every micro-batch and cannot deadlock."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ._actions import LOSS_OF_ALL, TRANSFERS, Action, Kind, Program, Step
from ._offloads import expect_prefetched
from ._replay import replay
from ._schedule import Schedule

_TRAINED = re.compile("FR?(B|IW)")
"""Matches the letters of a stage's actions on one micro-batch."""


def validate(schedule: Schedule, microbatches: int, placement: Sequence[int]) -> None:
    """Raise ValueError unless ``schedule`` trains every micro-batch once on the workers of ``placement``.

    For each micro-batch, every stage runs one forward, then an optional recomputation, then either one backward or one
    backward for the inputs followed by one for the weights. The last stage may compute the loss of the full mini-batch
    once, after all its forwards and before all its backwards. Saved tensors that leave for the host return before their
    backward. Whether stages are loaded is not checked.

    Args:
        schedule: the program of each stage.
        microbatches: the number of micro-batches.
        placement: the worker of each stage.

    Raises:
        ValueError: a stage runs other actions for a micro-batch, the loss is misplaced, saved tensors are on the host
            in a backward, the workers wait for each other forever, or ``schedule`` and ``placement`` have different
            numbers of stages. The message names the actions.
    """
    if len(schedule) != len(placement):
        raise ValueError(f"the schedule is for {len(schedule)} stages, but the pipe has {len(placement)}")
    for j, program in enumerate(schedule):
        # Micro-batches may run in any order, and the replay finds deadlocks, so check each micro-batch separately.
        done: dict[int, list[Action]] = {i: [] for i in range(microbatches)}
        _expect_loss(schedule, j)
        for action in program:
            if action.kind in (Kind.LOSS, *TRANSFERS):
                continue
            i = action.microbatch
            if i not in done:
                raise ValueError(
                    f"{Step(j, action)} is for micro-batch {i}, but there are {microbatches}, counted from 0"
                )
            done[i].append(action)
        for i, actions in done.items():
            if _TRAINED.fullmatch("".join(Kind(kind).letter for kind, _ in actions)) is None:
                raise ValueError(
                    f"stage {j} does {' '.join(map(str, actions)) or 'nothing'} for micro-batch {i}; expected F{i}, "
                    f"perhaps R{i}, and then B{i}, or I{i} and W{i}"
                )
    worker_steps = schedule.on(placement)
    expect_prefetched(worker_steps, range(len(schedule)))
    replay(worker_steps)


def _expect_loss(schedule: Schedule, stage: int) -> None:
    """Raise ValueError if ``stage`` computes the loss of the full mini-batch at the wrong position."""
    program = schedule[stage]
    if not any(kind == Kind.LOSS for kind, _ in program):
        return
    others = Schedule([*schedule[:stage], [action for action in program if action.kind != Kind.LOSS]])
    if stage != len(schedule) - 1 or others.with_loss()[stage] != program:
        raise ValueError(
            f"stage {stage} does {' '.join(map(str, program))}; {LOSS_OF_ALL}, the loss of the full mini-batch, must "
            "be computed once, by the last stage, after its last forward and before its first backward"
        )


_BEGINS = (Kind.FORWARD, Kind.PREFETCH)
_ENDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.OFFLOAD)


def in_flight(program: Program) -> int:
    """Return the maximum number of micro-batches whose activations a stage holds at once.

    Args:
        program: the actions of a stage. A micro-batch does not count while its saved tensors are on the host.

    Returns:
        The peak number of micro-batches in flight.
    """
    held = most = 0
    for kind, _ in program:
        # A backward for the weights still reads some activations after the backward for the inputs.
        held += (kind in _BEGINS) - (kind in _ENDS)
        most = max(most, held)
    return most
