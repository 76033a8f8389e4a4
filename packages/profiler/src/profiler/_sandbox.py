"""Copies of layers to measure, so that the caller's module does not change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from microbatch import Batch

from ._storages import tensor_bytes

_SMALL = 256 * 2**20


def layerwise_sandbox(module: Iterable[nn.Module], device: torch.device | str | int) -> Iterator[nn.Module]:
    """Deep copies of the layers on `device`, in training mode.

    A layer is copied when the iterator reaches it, so only one copy needs to exist at a time. Forward hooks are copied,
    since they are part of what a layer does; hooks on parameters and gradients are not.

    Args:
        module: the layers, such as an ``nn.Sequential``, which do not change.
        device: the device of the copies.

    Returns:
        An iterator over the copies, in order.
    """
    for layer in module:
        yield copy.deepcopy(layer, computed_copies(layer)).to(device).train()


def computed_copies(layer: nn.Module) -> dict[int, torch.Tensor]:
    """A memo for ``copy.deepcopy`` with detached copies of the tensors that it refuses: those computed from others.

    An example is the weight that ``torch.nn.utils.weight_norm`` computes in every forward, and keeps in an attribute.
    """
    attributes = (value for child in layer.modules() for value in vars(child).values())
    return {id(x): x.detach().clone() for x in attributes if isinstance(x, torch.Tensor) and x.grad_fn is not None}


def repeatable_sandbox(module: nn.Sequential, device: torch.device) -> Callable[[], Iterator[nn.Module]]:
    """A function that returns `layerwise_sandbox` each time; copies of a small module are made only once.

    Copying a small layer takes longer than running it, so this leaves time for many more rounds.
    """
    if tensor_bytes([*module.parameters(), *module.buffers()]) > _SMALL:
        return lambda: layerwise_sandbox(module, device)
    kept: dict[int, nn.Module] = {}

    def copies() -> Iterator[nn.Module]:
        for i, layer in enumerate(module):
            if i not in kept:
                (kept[i],) = layerwise_sandbox([layer], device)
            yield kept[i]

    return copies


def detach(batch: Batch) -> None:
    """Detaches `batch` from its graph, in place. A tensor that requires grad becomes a leaf that does.

    Args:
        batch: the batch, whose tensors are replaced.
    """
    for i, x in enumerate(batch):
        batch[i] = x.detach().requires_grad_(x.requires_grad)
