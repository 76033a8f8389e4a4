"""Hands a tensor to a layer as if another layer had made it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from microbatch import Batch, map_tensors


class _Enter(torch.autograd.Function):
    # A leaf that requires grad refuses in-place operations, and so does a view of one.
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, copies: bool) -> torch.Tensor:
        return leaf.clone() if copies else leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def enter(x: torch.Tensor, *, copies: bool = False) -> torch.Tensor:
    """`x`, or a copy of it, on a graph of its own; an in-place first operation may overwrite it."""
    leaf = x.detach()
    if not x.requires_grad:
        return leaf.clone() if copies else leaf
    entered: torch.Tensor = _Enter.apply(leaf.requires_grad_(), copies)  # type: ignore[no-untyped-call]
    return entered


def is_entrance(node: torch.autograd.graph.Node) -> bool:
    """Whether a gradient leaves a layer here, into a tensor that it was handed."""
    return isinstance(node, _Enter._backward_cls)


def enter_batch(batch: Batch, *, copies: bool = False) -> Batch:
    return batch.call(lambda value: map_tensors(partial(enter, copies=copies), value))


def copy_to(batch: Batch, device: torch.device) -> Batch:
    """A copy that a layer may overwrite, on `device`; which tensors require a gradient is kept."""
    return copied(batch.call(lambda value: map_tensors(lambda x: _moved(x, device), value)))


def _moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.detach().to(device).requires_grad_(x.requires_grad)


def copied(batch: Batch) -> Batch:
    """The same values in memory of their own, cut off from what they were made of."""
    return batch.call(lambda value: map_tensors(_clone, value))


def _clone(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)
