"""A small model with its own forward, and helpers to run it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gpipe
from gpipe import GPipe

from ..layers import DOUBLE, Layer


class Residuals(nn.Module):
    """A residual network of blocks, with callbacks between them.

    Attributes:
        between: called with the index of each block and its input, which is replaced by the result, unless it is None.
        end: called with the output.
    """

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.layers = nn.ModuleList(blocks)
        self.between: Callable[[int, Tensor], Any] = nothing
        self.end: Callable[[Tensor], Any] = nothing
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -0.6, 0.6)
        self.to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for k, layer in enumerate(self.layers):
            changed = self.between(k, x)
            x = x if changed is None else changed
            x = x + layer(x)
        x = self.head(x)
        self.end(x)
        return x


def nothing(*_: Any) -> None:
    pass


def residuals(blocks: int = 4) -> Residuals:
    return Residuals(*(nn.Linear(3, 3) for _ in range(blocks)))


def of_function(function: Callable[..., Tensor], blocks: int = 4) -> Residuals:
    """Return a model whose blocks call ``function`` with themselves and the sum; ``block.k`` is the block's index."""
    return Residuals(*(Layer(function, nn.Linear(3, 3), k=k) for k in range(blocks)))


def two_stages(model: nn.Module, **options: Any) -> GPipe:
    return GPipe(model, devices=["cpu"] * 2, **{"chunks": 3, **options})


def forward_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gpipe forward")}


def is_first() -> bool:
    """Return whether this is not a recomputation."""
    return not gpipe.is_recomputing()


def plain_of(pipe: GPipe) -> Any:
    return copy.deepcopy(pipe[:])
