"""The loss as one more layer after the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from microbatch import flatten, map_tensors, unflatten

LossFunction = Callable[[Any, Any], Any]
"""A function of an output and a target that returns a scalar loss, or the sum of losses and their count."""


class LossLayer(nn.Module):
    """Calls ``loss_fn`` with its input and a target that it holds; of ``(sum, count)`` it returns the sum."""

    def __init__(self, loss_fn: LossFunction, target: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self._target = map_tensors(self._keep, target)

    def _keep(self, tensor: Tensor) -> _Named:
        """Register ``tensor`` as a buffer, so that it is moved with the layer. Returns a placeholder."""
        name = _Named(f"target{len(self._buffers)}")
        self.register_buffer(name, tensor.detach())
        return name

    def forward(self, output: Any) -> Any:
        leaves, tree = flatten(self._target)
        target = unflatten([self._buffers[leaf] if isinstance(leaf, _Named) else leaf for leaf in leaves], tree)
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
