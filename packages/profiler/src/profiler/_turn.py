"""The begin of the backward of one layer: gradients that a later layer would have computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *roots: torch.Tensor) -> torch.Tensor:
        # A sparse gradient cannot be made from a shape: for such a root its own values are used.
        ctx.ready = [_ready(root) for root in roots]
        ctx.like = [_shape(root) if _is_plain(root) else None for root in roots]
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([_made(ready, like) for ready, like in zip(ctx.ready, ctx.like, strict=True)])


SEED = torch.ones(())
"""The gradient with which a backward from such a tensor begins."""


def turned(roots: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor whose backward makes gradients of ones for ``roots``, and frees each as soon as it was used.

    It refers to the graph of ``roots``, but not to ``roots``.
    """
    turn: torch.Tensor = _Turn.apply(*roots)  # type: ignore[no-untyped-call]
    return turn


def _is_plain(root: torch.Tensor) -> bool:
    return root.layout is torch.strided and not is_traceable_wrapper_subclass(root)


def _ready(root: torch.Tensor) -> torch.Tensor | None:
    if _is_plain(root):
        return None
    return torch.ones_like(root) if root.layout is torch.strided else root.detach().clone()


def _shape(root: torch.Tensor) -> tuple[torch.Tensor, torch.device]:
    return torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device="meta"), root.device


def _made(ready: torch.Tensor | None, like: Any) -> torch.Tensor:
    return torch.ones_like(like[0], device=like[1]) if ready is None else ready
