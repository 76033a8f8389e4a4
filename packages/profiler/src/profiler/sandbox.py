"""Copies of layers to measure, so that the caller's module does not change."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from microbatch import Batch

__all__ = ["copied"]

Layer = TypeVar("Layer", bound=nn.Module)


def layerwise_sandbox(module: Iterable[nn.Module], device: torch.device | str | int) -> Iterator[nn.Module]:
    """Deep copies of the layers on `device`, in training mode, each made when the iterator reaches it.

    Forward hooks are copied, since they are part of what a layer does; hooks on parameters and gradients are not.

    Args:
        module: the layers, such as an ``nn.Sequential``, which do not change.
        device: the device of the copies.

    Returns:
        An iterator over the copies, in order.
    """
    return (copy_on(layer, device) for layer in module)


def copy_on(layer: nn.Module, device: torch.device | str | int) -> nn.Module:
    return copied(layer).to(device).train()


def copied(layer: Layer) -> Layer:
    """A deep copy of a module, also of one that keeps tensors with a graph in attributes.

    Args:
        layer: the module, which does not change.

    Returns:
        The copy, on the same device and in the same mode. Such tensors are detached in it.
    """
    # Deepcopy refuses tensors that were computed, such as the weight that `torch.nn.utils.weight_norm` computes in
    # every forward, and keeps in an attribute.
    detached: dict[int, Any] = {id(x): x.detach().clone() for x in tensors_of(layer) if x.grad_fn is not None}
    detached |= {id(x): _duplicate(x) for x in tensors_of(layer) if is_traceable_wrapper_subclass(x)}
    return copy.deepcopy(layer, detached)


def _duplicate(x: Tensor) -> Tensor:
    """A copy of an instance of a subclass; some libraries have ones that deepcopy refuses."""
    try:
        return copy.deepcopy(x)
    except RuntimeError:
        names, context = x.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: _duplicate(getattr(x, name)) for name in names}
        made: Tensor = type(x).__tensor_unflatten__(parts, context, x.size(), x.stride())  # type: ignore[attr-defined]
        return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def tensors_of(layer: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a layer, and the tensors that are plain attributes of modules in it."""
    for child in layer.modules():
        for owner in (child._parameters, child._buffers, vars(child)):
            yield from (value for value in owner.values() if isinstance(value, Tensor))


def detach(batch: Batch) -> None:
    """Detaches `batch` from its graph, in place. A tensor that requires grad becomes a leaf that does.

    Args:
        batch: the batch, whose tensors are replaced.
    """
    for i, x in enumerate(batch):
        batch[i] = x.detach().requires_grad_(x.requires_grad)
