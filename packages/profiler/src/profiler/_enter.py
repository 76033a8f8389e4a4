"""Hands a tensor to a layer as if another layer had made it."""

from __future__ import annotations

from typing import Any

import torch

from microbatch import Batch, map_tensors


class _Enter(torch.autograd.Function):
    # A leaf that requires grad refuses in-place operations, and so does a view of one.
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def enter(x: torch.Tensor) -> torch.Tensor:
    """`x` on a graph of its own; an in-place first operation may overwrite it."""
    leaf = x.detach()
    if not x.requires_grad:
        return leaf
    entered: torch.Tensor = _Enter.apply(leaf.requires_grad_())  # type: ignore[no-untyped-call]
    return entered


def enter_batch(batch: Batch) -> Batch:
    return batch.call(lambda value: map_tensors(enter, value))


def copy_to(batch: Batch, device: torch.device) -> Batch:
    """A copy that a layer may overwrite, on `device`; which tensors require a gradient is kept."""

    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(device).clone().requires_grad_(x.requires_grad)

    return batch.call(lambda value: map_tensors(copied, value))
