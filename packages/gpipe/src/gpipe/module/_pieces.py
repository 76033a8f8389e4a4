"""Partitions of which only some layers are checkpointed, in pieces: consecutive layers with the same flag."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from ..engine._stage import Stage, stages_of
from ..schedule._flags import as_lists, expect_flags, moved, runs_of, scheduled
from ..skip import SkipLayout, inspect_skip_layout
from ._arguments import checked_mode, checked_modes
from ._partition import partition_of

Choice = str | list[bool]
"""How a partition is checkpointed: by a mode, or by a flag for each layer."""

Choices = str | list[Choice]
"""How all partitions are checkpointed: by one mode, or one choice for each."""


class Piece(NamedTuple):
    """Consecutive layers that are computed as one cell.

    Attributes:
        module: a module with these layers.
        partition: the number of their partition.
        recomputed: whether they are checkpointed; None for a whole partition, for which its mode decides.
    """

    module: nn.Module
    partition: int
    recomputed: bool | None = None


def checked_choices(checkpoint: Any) -> Choices:
    """``checkpoint`` as a mode, or a list with a mode, or flags for its layers, for each partition."""
    if isinstance(checkpoint, (list, tuple)):
        return [_checked(choice, f"checkpoint[{j}]") for j, choice in enumerate(checkpoint)]
    return checked_mode(checkpoint, "checkpoint")


def _checked(choice: Any, name: str) -> Choice:
    if not isinstance(choice, (list, tuple)):
        return checked_mode(choice, name)
    expect_flags(choice, name)
    return list(choice)


def expect_fitting(choices: Choices, sizes: Sequence[int]) -> Choices:
    """``choices``; ValueError unless they are for partitions of these sizes."""
    checked_modes(choices, len(sizes))
    if isinstance(choices, str):
        return choices
    for j, (choice, size) in enumerate(zip(choices, sizes, strict=True)):
        if not isinstance(choice, str) and len(choice) != size:
            raise ValueError(
                f"checkpoint[{j}] must be one mode, or one flag for each of the {size} layers of partition {j}; got "
                f"{len(choice)}: {choice!r}"
            )
    return choices


def copied(choices: Choices) -> Choices:
    """A copy of ``choices``."""
    return choices if isinstance(choices, str) else as_lists(choices)


def rebalanced(choices: Choices, before: Sequence[int], after: Sequence[int]) -> Choices:
    """The choices for partitions of other sizes; see :func:`gpipe.schedule._flags.moved`."""
    return choices if isinstance(choices, str) else as_lists(moved(choices, before, after))


def modes_of(choices: Choices) -> str | list[str]:
    """The modes for schedules: a partition in pieces is not checkpointed as a whole."""
    return choices if isinstance(choices, str) else [*map(scheduled, choices)]


def in_runs(choices: Choices) -> dict[int, list[tuple[bool, int, int]]]:
    """For each partition in pieces, its pieces: whether they are checkpointed, the first layer, and the end."""
    if isinstance(choices, str):
        return {}
    found = {j: [*runs_of(choice)] for j, choice in enumerate(choices) if not isinstance(choice, str)}
    return {j: runs for j, runs in found.items() if len(runs) > 1}


def pieces_of(partitions: Iterable[nn.Module], choices: Choices) -> list[Piece]:
    """The pieces of all partitions, in order. Layers are not moved."""
    runs = in_runs(choices)
    found: list[Piece] = []
    for j, partition in enumerate(partitions):
        found += _cut(partition, j, runs[j]) if j in runs else [Piece(partition, j)]
    return found


def laid_out(pieces: Sequence[Piece], devices: Sequence[torch.device]) -> tuple[list[Stage], SkipLayout]:
    """A stage for each piece, and the skips between them.

    Args:
        devices: the device of each partition.
    """
    modules = [piece.module for piece in pieces]
    layout = inspect_skip_layout(modules)
    kinds = [(piece.partition, piece.recomputed) for piece in pieces]
    return stages_of(modules, [devices[piece.partition] for piece in pieces], layout, kinds), layout


def _cut(partition: nn.Module, j: int, runs: Iterable[tuple[bool, int, int]]) -> Iterable[Piece]:
    layers = iter(partition.named_children())
    for recomputed, first, end in runs:
        yield Piece(partition_of(islice(layers, end - first), partition.training), j, recomputed)


def flags_of(choices: Choices) -> list[list[bool] | None] | None:
    """The flags of each partition that has any; None if no partition has."""
    if isinstance(choices, str) or all(isinstance(each, str) for each in choices):
        return None
    return [None if isinstance(each, str) else each for each in choices]


def expect_callable_in_pieces(partitions: Mapping[int, nn.Module], choices: Choices) -> None:
    """Before a run: raise RuntimeError if a partition in pieces has hooks, or is compiled, which would be left out.

    Args:
        partitions: the partitions in this process, by number.
    """
    for j in in_runs(choices).keys() & partitions.keys():
        partition = partitions[j]
        hooks = partition._forward_hooks or partition._forward_pre_hooks
        if hooks or partition._backward_hooks or partition._backward_pre_hooks or partition._compiled_call_impl:
            raise RuntimeError(
                f"partition {j} has hooks or is compiled as a whole, but some of its layers are checkpointed and "
                "others are not, so that they are called in pieces; hook or compile its layers, or give it one mode"
            )
