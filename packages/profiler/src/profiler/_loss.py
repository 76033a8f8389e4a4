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
        self._target = map_tensors(lambda _: None, target)
        for k, leaf in enumerate(flatten(target)[0]):
            if isinstance(leaf, Tensor):
                self.register_buffer(f"target{k}", leaf.detach())  # so it is moved with the layer

    def forward(self, output: Any) -> Any:
        leaves, tree = flatten(self._target)
        leaves = [self._buffers.get(f"target{k}", leaf) for k, leaf in enumerate(leaves)]
        loss = self.loss_fn(output, unflatten(leaves, tree))
        return loss[0] if isinstance(loss, tuple) else loss


def with_loss(chain: nn.Sequential, loss_fn: LossFunction, target: Any) -> nn.Sequential:
    longer = nn.Sequential()
    name = "loss" if "loss" not in chain._modules else f"loss of {len(chain)} layers"
    longer._modules.update({**chain._modules, name: LossLayer(loss_fn, target)})
    return longer
