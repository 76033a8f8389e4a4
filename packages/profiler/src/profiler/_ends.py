"""Run a layer in isolation: make its inputs non-leaf tensors, and seed its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from microbatch import Batch, map_tensors


class _Enter(torch.autograd.Function):
    # Leaves that require grad, and their views, cannot be modified in place.
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, copies: bool) -> torch.Tensor:
        return leaf.clone() if copies else leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def enter(x: torch.Tensor, *, copies: bool = False) -> torch.Tensor:
    """Return `x`, or a copy of it, as a non-leaf tensor if it requires grad, so that a layer may modify it in place."""
    leaf = x.detach()
    if not x.requires_grad:
        return leaf.clone() if copies else leaf
    entered: torch.Tensor = _Enter.apply(leaf.requires_grad_(), copies)  # type: ignore[no-untyped-call]
    return entered


def is_entrance(node: torch.autograd.graph.Node) -> bool:
    """Return whether `node` was created by :func:`enter`."""
    return isinstance(node, _Enter._backward_cls)


def enter_batch(batch: Batch, *, copies: bool = False) -> Batch:
    return batch.call(lambda value: map_tensors(lambda x: enter(x, copies=copies), value))


def copy_batch(batch: Batch, device: torch.device | None = None) -> Batch:
    """Return a detached copy, which a layer may overwrite."""

    def clone(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(device or x.device, copy=True).requires_grad_(x.requires_grad)

    return batch.call(lambda value: map_tensors(clone, value))


def gradients_for(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients of ones; for a sparse root, a copy of it."""
    return [torch.ones_like(y) if y.layout is torch.strided else y.detach().clone() for y in roots]


SEED = torch.ones(())
"""The gradient that starts a backward from the result of :func:`ones_backward_root`."""


def ones_backward_root(roots: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor whose backward seeds ``roots`` with ones, and frees each gradient after its use.

    The tensor refers to the graph of ``roots``, but not to ``roots``.
    """
    ones_root: torch.Tensor = _OnesBackwardRoot.apply(*roots)  # type: ignore[no-untyped-call]
    return ones_root


class _OnesBackwardRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *roots: torch.Tensor) -> torch.Tensor:
        ctx.gradients = [_gradient_later(root) for root in roots]
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([make() for make in ctx.gradients])


def _gradient_later(root: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that creates the gradient of ``root`` from its shape, so that ``root`` may be freed."""
    if root.layout is not torch.strided or is_traceable_wrapper_subclass(root):
        (ready,) = gradients_for([root])  # a shape is not enough to create it
        return lambda: ready
    shape = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device="meta")
    return partial(torch.ones_like, shape, device=root.device)
