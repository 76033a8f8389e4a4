"""How many layers each partition gets, from what the layers cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from blockpartition import partition
from profiler import profile_sizes, profile_times

Device = torch.device | int | str


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """Layers in each of `partitions` blocks such that the most expensive block is as cheap as possible.

    >>> balance_cost([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    """
    return list(partition(cost, partitions).sizes)


def balance_by_time(
    partitions: int, module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: Device | None = None
) -> list[int]:
    """Balances the time of forward plus backward, measured on `sample` for about `timeout` seconds."""
    return balance_cost(profile_times(module, sample, timeout, device), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,  # noqa: A002
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Balances the memory of training: what a micro-batch leaves behind, and `param_scale` times the parameters."""
    return balance_cost(profile_sizes(module, input, chunks, param_scale, device), partitions)
