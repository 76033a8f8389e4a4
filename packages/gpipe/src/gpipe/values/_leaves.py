"""What travels between stages: tensors cut off from the graph they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from microbatch import Arguments as Arguments
from microbatch import Batch, map_tensors

from ._memory import clone, cloned_together, storage_id


class SharedBatch(Batch):
    """A batch with tensors whose memory is also somebody else's; see :mod:`gpipe.values._sharing`.

    Attributes:
        ties: for each tensor, who else has to do with its memory: a sum of flags.
    """

    __slots__ = ("ties",)

    def __init__(self, value: Any, ties: Sequence[int]) -> None:
        super().__init__(value)
        self.ties = ties


def map_batch(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """The same structure with ``function`` applied to every tensor."""
    value = function(batch.value) if isinstance(batch.value, Tensor) else map_tensors(function, batch.value)
    return SharedBatch(value, batch.ties) if isinstance(batch, SharedBatch) else Batch(value)


def own_memory(found: Sequence[Tensor | None], kept: Iterable[Tensor | None]) -> list[Tensor | None]:
    """``found`` in memory of their own: the stage that they are sent to may overwrite them before all else is done."""
    taken = {storage_id(gradient) for gradient in kept if gradient is not None}
    gradients: list[Tensor | None] = []
    for gradient in found:
        if gradient is not None and storage_id(gradient) in taken:
            gradient = gradient.clone()
        taken.update([] if gradient is None else [storage_id(gradient)])
        gradients.append(gradient)
    return gradients


def like_accumulated(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """``gradient`` in memory as autograd would accumulate it in ``leaf``; kernels that read it may round by that."""
    if gradient is None or gradient.layout is not torch.strided or gradient.stride() == leaf.stride():
        return gradient
    return torch.empty_like(leaf, requires_grad=False).copy_(gradient)


def detach_leaves(batch: Batch) -> Batch:
    """The same tensors as leaves of a graph that begins here; those that require grad still do."""
    return map_batch(batch, _leaf)


def clone_leaves(batch: Batch) -> Batch:
    """Like :func:`detach_leaves`, in memory of their own."""
    if not isinstance(batch, SharedBatch):
        return map_batch(batch, clone)
    clones = iter(cloned_together(list(batch)))
    return map_batch(batch, lambda _: next(clones))


def as_nonleaf(batch: Batch) -> Batch:
    """The same tensors for layers that work in place on them: torch lets nobody change a leaf that requires grad."""
    return map_batch(batch, _enter)


def versions(batch: Batch) -> list[int]:
    """How often each tensor has been changed in place, as far as torch counts."""
    return [0 if tensor.is_inference() else tensor._version for tensor in batch]


def _leaf(tensor: Tensor) -> Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if tensor.requires_grad else leaf


def _enter(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    as_nonleaf: Tensor = AsNonleaf.apply(tensor)  # type: ignore[no-untyped-call]
    return as_nonleaf


class AsNonleaf(torch.autograd.Function):
    """The identity. Its output is no leaf, and has the version counter of its input, so that no change is missed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # where no gradient flows there is none, and not one of zeros
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


_OWN = getattr(AsNonleaf, "_backward_cls", None)


def is_custom(kind: type[Node]) -> bool:
    """Whether nodes of this kind are written in Python, other than that by which tensors enter a stage."""
    return issubclass(kind, BackwardCFunction) and kind is not _OWN
