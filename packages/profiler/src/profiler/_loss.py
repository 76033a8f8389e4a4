"""The loss as one more layer after the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from microbatch import flatten, map_tensors, unflatten

from ._storages import tensor_bytes

LossFunction = Callable[[Any, Any], Any]
"""A function of an output and a target that returns a scalar loss, or the sum of losses and their count."""


class LossLayer(nn.Module):
    """Calls ``loss_fn`` with its input and a target that it holds; of ``(sum, count)`` it returns the sum."""

    def __init__(self, loss_fn: LossFunction, target: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self._names: list[_Named] = []
        self._target = map_tensors(self._keep, target)

    def _keep(self, tensor: torch.Tensor) -> _Named:
        """Register ``tensor`` as a buffer, so that it is moved with the layer. Returns a placeholder."""
        name = _Named(f"target{len(self._names)}")
        self.register_buffer(name, tensor.detach())
        self._names.append(name)
        return name

    @property
    def target_bytes(self) -> int:
        """Bytes of the target, which are not counted as buffers of the loss."""
        return tensor_bytes([getattr(self, name) for name in self._names])

    def forward(self, output: Any) -> Any:
        leaves, tree = flatten(self._target)
        target = unflatten([getattr(self, leaf) if isinstance(leaf, _Named) else leaf for leaf in leaves], tree)
        loss = self.loss_fn(output, target)
        return loss[0] if isinstance(loss, tuple) else loss


class _Named(str):
    """Takes the place of a tensor that is a buffer; has the name of the buffer."""

    __slots__ = ()


def with_loss(chain: nn.Sequential, loss_fn: LossFunction, target: Any) -> nn.Sequential:
    """``chain`` with the loss as its last layer."""
    longer = nn.Sequential()
    name = "loss" if "loss" not in chain._modules else f"loss of {len(chain)} layers"
    longer._modules.update({**chain._modules, name: LossLayer(loss_fn, target)})
    return longer
