"""What commands are given: models, mini-batches, devices."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.status import Status
from torch import nn

import profiler
from profiler import Profile

from .._flatten import flatten

Texts = Annotated[list[str], Parameter(consume_multiple=True, negative="")]
Devices = Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")]
Numbers = Annotated[list[int] | None, Parameter(consume_multiple=True, negative="")]
Switch = Annotated[bool, Parameter(negative="")]


def layers_of(model: nn.Module, sample: Any) -> nn.Sequential:
    """The layers of ``model``."""
    return model if isinstance(model, nn.Sequential) else flatten(model, sample)


def profiled(layers: nn.Sequential, sample: Any, device: str, chunks: int, timeout: float) -> Profile:
    """What layers cost, with a progress bar on a terminal."""
    bar = Console(stderr=True).is_terminal
    return profiler.profile(layers, sample, device=torch.device(device), chunks=chunks, timeout=timeout, progress=bar)


def busy(what: str) -> Status:
    """Shows on a terminal that something is going on, inside a ``with`` block."""
    return Console(stderr=True).status(f"{what} …")
