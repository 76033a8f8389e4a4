"""The start of the backward of one layer: gradients that a later layer would have computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *roots: torch.Tensor) -> torch.Tensor:
        plain = [root.layout is torch.strided and not is_traceable_wrapper_subclass(root) for root in roots]
        # Shapes only, so that the outputs are freed; others cannot be made from a shape.
        ctx.like = [(_shape(root) if p else None, root.device) for root, p in zip(roots, plain, strict=True)]
        ctx.ready = [None if p else gradients_for([root])[0] for root, p in zip(roots, plain, strict=True)]
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = zip(ctx.ready, ctx.like, strict=True)
        return tuple([torch.ones_like(like, device=on) if ready is None else ready for ready, (like, on) in pairs])


SEED = torch.ones(())
"""The gradient with which a backward from such a tensor begins."""


def turned(roots: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor whose backward makes gradients of ones for ``roots``, and frees each as soon as it was used.

    It refers to the graph of ``roots``, but not to ``roots``.
    """
    turn: torch.Tensor = _Turn.apply(*roots)  # type: ignore[no-untyped-call]
    return turn


def gradients_for(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients with which a backward from ``roots`` begins: ones, or the values of a sparse root."""
    return [torch.ones_like(y) if y.layout is torch.strided else y.detach().clone() for y in roots]


def _shape(root: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device="meta")
