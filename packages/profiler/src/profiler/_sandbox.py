"""Copies of layers to experiment on, so that the caller's module stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from microbatch import Batch


def layerwise_sandbox(module: Iterable[nn.Module], device: torch.device | str | int) -> Iterator[nn.Module]:
    """Deep copies of the layers on `device`, in training mode.

    A layer is copied when it is asked for, so only one copy need exist at a time.  Forward hooks are part of what a
    layer does and come along; hooks on parameters and gradients stay behind.
    """
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def detach(batch: Batch) -> None:
    """Cuts `batch` off its graph, in place; a tensor that required a gradient becomes a leaf that does."""
    for i, x in enumerate(batch):
        batch[i] = x.detach().requires_grad_(x.requires_grad)
