"""Copies of layers to experiment on, so that the caller's module stays as it is."""

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

    A layer is copied when it is asked for, so only one copy need exist at a time.  Forward hooks are part of what a
    layer does and come along; hooks on parameters and gradients stay behind.

    Args:
        module: the layers, such as an ``nn.Sequential``; they stay as they are.
        device: where the copies go.

    Returns:
        An iterator over the copies, in order.
    """
    for layer in module:
        yield copy.deepcopy(layer, computed_copies(layer)).to(device).train()


def computed_copies(layer: nn.Module) -> dict[int, torch.Tensor]:
    """A memo for ``copy.deepcopy`` with detached copies of the tensors that it refuses: those computed from others.

    Such as the weight that ``torch.nn.utils.weight_norm`` leaves in a plain attribute, and computes again in every
    forward.
    """
    attributes = (value for child in layer.modules() for value in vars(child).values())
    return {id(x): x.detach().clone() for x in attributes if isinstance(x, torch.Tensor) and x.grad_fn is not None}


def repeatable_sandbox(module: nn.Sequential, device: torch.device) -> Callable[[], Iterator[nn.Module]]:
    """Gives `layerwise_sandbox` again and again; of a small module the copies are made only once.

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
    """Cuts `batch` off its graph, in place; a tensor that required a gradient becomes a leaf that does.

    Args:
        batch: its tensors are replaced.
    """
    for i, x in enumerate(batch):
        batch[i] = x.detach().requires_grad_(x.requires_grad)
