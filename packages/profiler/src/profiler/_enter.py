"""Pass tensors to a layer as the outputs of another layer."""

from __future__ import annotations

from typing import Any

import torch

from microbatch import Batch, map_tensors


class _Enter(torch.autograd.Function):
    # A leaf that requires grad cannot be changed in place, nor can a view of one.
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, copies: bool) -> torch.Tensor:
        return leaf.clone() if copies else leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def enter(x: torch.Tensor, *, copies: bool = False) -> torch.Tensor:
    """`x`, or a copy of it, as the output of a node; a first operation may overwrite it."""
    leaf = x.detach()
    if not x.requires_grad:
        return leaf.clone() if copies else leaf
    entered: torch.Tensor = _Enter.apply(leaf.requires_grad_(), copies)  # type: ignore[no-untyped-call]
    return entered


def is_entrance(node: torch.autograd.graph.Node) -> bool:
    """Whether `node` is where a tensor enters the layer, so that its gradient leaves it."""
    return isinstance(node, _Enter._backward_cls)


def enter_batch(batch: Batch, *, copies: bool = False) -> Batch:
    return batch.call(lambda value: map_tensors(lambda x: enter(x, copies=copies), value))


def copied(batch: Batch, device: torch.device | None = None) -> Batch:
    """A copy of the values, without their graph, that a layer may overwrite."""

    def clone(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(device or x.device, copy=True).requires_grad_(x.requires_grad)

    return batch.call(lambda value: map_tensors(clone, value))
