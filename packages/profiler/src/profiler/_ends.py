"""The two ends of a layer that runs alone: inputs as outputs of another, and gradients as from a later one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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
    """Whether `node` is where a tensor enters the layer."""
    return isinstance(node, _Enter._backward_cls)


def enter_batch(batch: Batch, *, copies: bool = False) -> Batch:
    return batch.call(lambda value: map_tensors(lambda x: enter(x, copies=copies), value))


def copied(batch: Batch, device: torch.device | None = None) -> Batch:
    """A detached copy, which a layer may overwrite."""

    def clone(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(device or x.device, copy=True).requires_grad_(x.requires_grad)

    return batch.call(lambda value: map_tensors(clone, value))


def gradients_for(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Ones, or the values of a sparse root."""
    return [torch.ones_like(y) if y.layout is torch.strided else y.detach().clone() for y in roots]


SEED = torch.ones(())
"""The gradient with which a backward from the result of :func:`ones_backward_root` begins."""


def ones_backward_root(roots: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor whose backward makes gradients of ones for ``roots``, and frees each as soon as it was used.

    It refers to the graph of ``roots``, but not to ``roots``.
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
    """Makes the gradient of ``root``, and keeps its shape only, so that ``root`` may be freed."""
    if root.layout is not torch.strided or is_traceable_wrapper_subclass(root):
        (ready,) = gradients_for([root])  # it cannot be made from a shape
        return lambda: ready
    shape = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device="meta")
    return partial(torch.ones_like, shape, device=root.device)
