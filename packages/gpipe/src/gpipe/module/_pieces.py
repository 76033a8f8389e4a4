"""A partition of which some layers are checkpointed and others are not, in pieces: runs of layers of one kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch import nn

from ..engine._stage import Stage, stages_of
from ..skip import SkipLayout, inspect_skip_layout
from ._arguments import checked_mode, checked_modes
from ._partition import Partition

Choice = str | list[bool]
"""How a partition is checkpointed: by one mode, or layer by layer."""

Choices = str | list[Choice]
"""The same of all partitions, or of each."""


class Piece(NamedTuple):
    """Layers in a row that are computed as one cell.

    Attributes:
        module: has them.
        partition: the number of the one they are in.
        recomputed: whether they are checkpointed; None if that is up to the mode of the partition, which it is whole.
    """

    module: nn.Module
    partition: int
    recomputed: bool | None = None


def checked_choices(checkpoint: Any) -> Choices:
    """``checkpoint`` as a mode, or a list with a mode, or one flag for each layer, for each partition."""
    if isinstance(checkpoint, (list, tuple)):
        return [_checked(choice, f"checkpoint[{j}]") for j, choice in enumerate(checkpoint)]
    return checked_mode(checkpoint, "checkpoint")


def _checked(choice: Any, name: str) -> Choice:
    if not isinstance(choice, (list, tuple)):
        return checked_mode(choice, name)
    for k, flag in enumerate(choice):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}[{k}] must be True or False: whether that layer is checkpointed; got {flag!r}")
    return list(choice)


def expect_fitting(choices: Choices, sizes: Sequence[int]) -> Choices:
    """``choices``, if they are for partitions of these sizes; else ValueError."""
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
    """The same, in lists of their own."""
    return choices if isinstance(choices, str) else [each if isinstance(each, str) else [*each] for each in choices]


def moved(choices: Choices, before: Sequence[int], after: Sequence[int]) -> Choices:
    """The choices for partitions of other sizes: flags follow their layers, and modes stay with their partitions.

    So a partition with a mode has it for layers that come from another one with a mode. It has flags itself once a
    layer comes with one that says something else than its mode.

    >>> moved([[True, False], "never"], [2, 1], [1, 2]), moved([[False, True], "never"], [2, 1], [1, 2])
    (['always', 'never'], ['never', [True, False]])
    """
    if isinstance(choices, str) or all(isinstance(each, str) for each in choices):
        return choices
    owners = [j for j, size in enumerate(before) for _ in range(size)]
    places = [k - sum(before[:j]) for k, j in enumerate(owners)]
    end, found = 0, list[Choice]()
    for own, size in zip(choices, after, strict=True):
        end += size
        layers = [(choices[owners[k]], places[k]) for k in range(end - size, end)]
        flags = [_flag(own if isinstance(own, str) else came, came, place) for came, place in layers]
        said = {flag for flag, (came, _) in zip(flags, layers, strict=True) if not isinstance(came, str)}
        found.append(own if isinstance(own, str) and said <= _SAYS[own] else _named(flags))
    return found


def _named(flags: list[bool]) -> Choice:
    """The mode that says the same, if there is one."""
    return "always" if all(flags) else flags if any(flags) else "never"


_SAYS: dict[str, set[bool]] = {"always": {True}, "never": {False}, "except_last": set()}
"""The flags that say the same as a mode."""


def _flag(mode: Choice, came: Choice, place: int) -> bool:
    """Whether a layer is checkpointed that came with a flag, or else has this mode."""
    return mode != "never" if isinstance(came, str) else came[place]


def modes_of(choices: Choices) -> str | list[str]:
    """What schedules see: of a partition in pieces nothing is checkpointed as a whole."""
    if isinstance(choices, str):
        return choices
    return [each if isinstance(each, str) else "always" if all(each) else "never" for each in choices]


def runs_of(choices: Choices) -> dict[int, list[tuple[bool, int]]]:
    """Of each partition in pieces these: whether they are checkpointed, and how many layers they have."""
    if isinstance(choices, str):
        return {}
    found = {j: _runs(choice) for j, choice in enumerate(choices) if not isinstance(choice, str)}
    return {j: runs for j, runs in found.items() if len(runs) > 1}


def _runs(flags: Sequence[bool]) -> list[tuple[bool, int]]:
    return [(flag, len([*run])) for flag, run in groupby(flags)]


def pieces_of(partitions: Iterable[nn.Module], choices: Choices) -> list[Piece]:
    """The pieces of all partitions, in order, with the layers as they are and where they are."""
    runs = runs_of(choices)
    found: list[Piece] = []
    for j, partition in enumerate(partitions):
        found += _cut(partition, j, runs[j]) if j in runs else [Piece(partition, j)]
    return found


def laid_out(pieces: Sequence[Piece], devices: Sequence[torch.device]) -> tuple[list[Stage], SkipLayout]:
    """What the engine sees of the pieces: a stage for each, and the skips between them.

    Args:
        devices: of the partitions.
    """
    modules = [piece.module for piece in pieces]
    layout = inspect_skip_layout(modules)
    kinds = [(piece.partition, piece.recomputed) for piece in pieces]
    return stages_of(modules, [devices[piece.partition] for piece in pieces], layout, kinds), layout


def _cut(partition: nn.Module, j: int, runs: Iterable[tuple[bool, int]]) -> Iterable[Piece]:
    layers = iter(partition.named_children())
    for recomputed, size in runs:
        piece = Partition()
        piece._modules.update(islice(layers, size))
        piece.training = partition.training
        yield Piece(piece, j, recomputed)


def flags_of(choices: Choices) -> list[list[bool] | None] | None:
    """Those of each partition that has any; None if none has."""
    if isinstance(choices, str) or all(isinstance(each, str) for each in choices):
        return None
    return [None if isinstance(each, str) else each for each in choices]


def expect_callable_in_pieces(partitions: Mapping[int, nn.Module], choices: Choices) -> None:
    """Before a run: RuntimeError if a partition whose layers are called in pieces should be called itself.

    Args:
        partitions: those that are here, by their numbers.
    """
    for j in runs_of(choices).keys() & partitions.keys():
        partition = partitions[j]
        hooks = partition._forward_hooks or partition._forward_pre_hooks
        if hooks or partition._backward_hooks or partition._backward_pre_hooks or partition._compiled_call_impl:
            raise RuntimeError(
                f"partition {j} has hooks or is compiled as a whole, but some of its layers are checkpointed and "
                "others are not, so that they are called in pieces; hook or compile its layers, or give it one mode"
            )
