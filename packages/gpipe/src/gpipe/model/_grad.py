"""Gradients that the forward of a model computes itself, for example forces from an energy.

A stage or a replay has only its own part of the graph, so ``torch.autograd.grad`` works only within that part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..values._leaves import get_tensors


def get_grad_inputs(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return the ``inputs`` of the call if ``function`` is ``torch.autograd.grad``, and nothing otherwise.

    Raises:
        RuntimeError: it is ``Tensor.backward``, which would end at the tensors of earlier stages.
    """
    if function in (Tensor.backward, torch.autograd.backward):
        raise RuntimeError(
            "between its blocks the model calls backward(), whose gradients would miss what goes through blocks of "
            "other stages; let it return the loss, call backward() in a block, or use the plain model: pipe[:]"
        )
    if function is not torch.autograd.grad:
        return ()
    return get_tensors(args[1] if len(args) > 1 else kwargs["inputs"])


class Leaves:
    """The leaves, other than parameters, that a model has used before the last call of a block."""

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Keep the leaves among ``tensors``, which also keeps others from getting their ids."""
        self._found.update((id(each), each) for each in tensors if _is_leaf(each))

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._found


def _is_leaf(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.grad_fn is None and not isinstance(tensor, nn.Parameter)


def through_blocks(model: str) -> RuntimeError:
    return RuntimeError(
        f"{model} calls torch.autograd.grad, perhaps by torch.func, with respect to a tensor that an earlier stage has "
        "computed, or that was there before a block was called; such a gradient would miss what goes through the "
        "blocks in between; compute it in a block, or use the plain model: pipe[:]"
    )
