"""Copy layers before measuring them, so that the caller's module does not change."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from microbatch import Batch

from .memory import is_compressed

__all__ = ["copied"]

Layer = TypeVar("Layer", bound=nn.Module)


def layerwise_sandbox(module: Iterable[nn.Module], device: torch.device | str | int) -> Iterator[nn.Module]:
    """Iterate over deep copies of the layers on `device`, in training mode. Each copy is created when it is reached.

    Forward hooks are copied, because they are part of the forward; hooks on parameters and gradients are not.

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
    """Deep-copy a module, even if its attributes include tensors with a graph.

    Args:
        layer: the module, which does not change.

    Returns:
        The copy, on the same device and in the same mode. Tensors with a graph are detached in it.
    """
    # deepcopy rejects non-leaf tensors, such as the weight that `torch.nn.utils.weight_norm` computes in every forward
    # and stores in an attribute.
    detached: dict[int, Any] = {id(x): x.detach().clone() for x in iterate_tensors(layer) if x.grad_fn is not None}
    special = (x for x in iterate_tensors(layer) if is_traceable_wrapper_subclass(x) or is_compressed(x))
    detached |= {id(x): _duplicate(x) for x in special}
    return copy.deepcopy(layer, detached)


def _duplicate(x: Tensor) -> Tensor:
    """Copy a tensor that deepcopy may refuse: of a subclass, or in a compressed sparse layout."""
    try:
        return copy.deepcopy(x)
    except RuntimeError:
        made = x.detach().clone() if is_compressed(x) else _from_parts(x)
        return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _from_parts(x: Tensor) -> Tensor:
    names, context = x.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: _duplicate(getattr(x, name)) for name in names}
    made: Tensor = type(x).__tensor_unflatten__(parts, context, x.size(), x.stride())  # type: ignore[attr-defined]
    return made


def iterate_tensors(layer: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a layer, and the tensors that are plain attributes of its modules."""
    for child in layer.modules():
        for owner in (child._parameters, child._buffers, vars(child)):
            yield from (value for value in owner.values() if isinstance(value, Tensor))


def detach(batch: Batch) -> None:
    """Detach `batch` from its graph, in place. A tensor that requires grad becomes a leaf that requires grad.

    Args:
        batch: the batch, whose tensors are replaced.
    """
    for i, x in enumerate(batch):
        batch[i] = x.detach().requires_grad_(x.requires_grad)
