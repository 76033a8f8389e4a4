"""The argument ``checkpoint`` of a pipe: how each partition is checkpointed, by a mode or by a flag for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..engine._stage import Stage, stages_of
from ..schedule._flags import runs_of, scheduled
from ..skip import SkipLayout, inspect_skip_layout
from ._arguments import checked_mode

Choice = str | list[bool]
"""How a partition is checkpointed: by a mode, or by a flag for each layer."""

Choices = str | list[Choice]
"""How all partitions are checkpointed: by one mode, or one choice for each."""


def checked_choices(checkpoint: Any) -> Choices:
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
    if isinstance(choices, str):
        return choices
    if len(choices) != len(sizes):
        raise ValueError(
            f"checkpoint must be one mode, or a list of one for each of the {len(sizes)} partitions; got "
            f"{len(choices)}: {choices!r}"
        )
    for j, (choice, size) in enumerate(zip(choices, sizes, strict=True)):
        if not isinstance(choice, str) and len(choice) != size:
            raise ValueError(
                f"checkpoint[{j}] must be one mode, or one flag for each of the {size} layers of partition {j}; got "
                f"{len(choice)}: {choice!r}"
            )
    return choices


def modes_of(choices: Choices) -> str | list[str]:
    """The modes for schedules: a partition with flags is not checkpointed as a whole."""
    return choices if isinstance(choices, str) else [*map(scheduled, choices)]


def blocks_of(choices: Choices) -> dict[int, list[range]]:
    """For each partition with flags, the numbers of consecutive checkpointed layers."""
    if isinstance(choices, str):
        return {}
    return {
        j: [range(first, end) for flag, first, end in runs_of(choice) if flag]
        for j, choice in enumerate(choices)
        if not isinstance(choice, str) and any(choice) and not all(choice)
    }


def laid_out(
    partitions: Iterable[nn.Module], devices: Sequence[torch.device], choices: Choices
) -> tuple[list[Stage], SkipLayout]:
    """A stage for each partition, and the skips between them."""
    modules = list(partitions)
    layout = inspect_skip_layout(modules)
    return stages_of(modules, devices, layout, blocks_of(choices)), layout
