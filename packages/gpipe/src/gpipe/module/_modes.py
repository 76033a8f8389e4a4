"""The ``checkpoint`` argument of a pipe: one mode, or one per partition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..engine._stage import Stage, build_stages
from ..skip import SkipLayout, inspect_skip_layout
from ._arguments import check_mode

Modes = str | list[str]


def check_modes(checkpoint: Any) -> Modes:
    if not isinstance(checkpoint, (list, tuple)):
        return check_mode(checkpoint, "checkpoint")
    for j, mode in enumerate(checkpoint):
        if isinstance(mode, (list, tuple, bool)):
            raise TypeError(
                f"checkpoint[{j}] must be the mode of partition {j}, such as 'always'; got {mode!r}. To recompute only "
                "some of its layers, use torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in their forward"
            )
    return [check_mode(mode, f"checkpoint[{j}]") for j, mode in enumerate(checkpoint)]


def expect_fitting(modes: Modes, partitions: int) -> Modes:
    if not isinstance(modes, str) and len(modes) != partitions:
        raise ValueError(
            f"checkpoint must be one mode, or a list with one mode per partition; got {len(modes)} for {partitions} "
            f"partitions: {modes!r}"
        )
    return modes


def laid_out(partitions: Iterable[nn.Module], devices: Sequence[torch.device]) -> tuple[list[Stage], SkipLayout]:
    """Return one stage per partition, and the layout of the skips between them."""
    modules = list(partitions)
    layout = inspect_skip_layout(modules)
    return build_stages(modules, devices, layout), layout
