"""List the layers to profile, with the loss appended as a final layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from microbatch import flatten, map_tensors, unflatten

LossFunction = Callable[[Any, Any], Any]
"""A function of an output and a target that returns a scalar loss, or a tuple that starts with one."""


def get_layers(module: nn.Module) -> nn.Sequential:
    """Return the layers of ``module`` in execution order, with their names.

    ``module`` is an ``nn.Sequential``, or iterates over its children and runs them in order, like ``GPipe``.
    """
    if not isinstance(module, nn.Sequential) and not _is_chain(module):
        raise TypeError(f"module: expected nn.Sequential, got {type(module).__name__}; wrap the layers in one")
    chain = nn.Sequential()
    # add_module rejects names with dots.
    chain._modules.update({name: child for name, child in module._modules.items() if child is not None})
    if not chain:
        raise ValueError("module: expected at least one layer, got an empty nn.Sequential")
    for name, tensor in (*chain.named_parameters(), *chain.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"module: {name!r} is lazy and has no size yet; run the module once on a sample first")
    return chain


def _is_chain(module: nn.Module) -> bool:
    # A ModuleList also iterates over its children, but has no forward.
    if not isinstance(module, nn.Module) or type(module).forward is nn.Module.forward:
        return False
    return isinstance(module, Iterable) and list(module) == [child for child in module._modules.values() if child]


class LossLayer(nn.Module):
    """A layer that calls ``loss_fn`` with its input and a stored target. If the loss is a tuple, it returns the first
    entry."""

    def __init__(self, loss_fn: LossFunction, target: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self._target = map_tensors(lambda _: None, target)
        for k, leaf in enumerate(flatten(target)[0]):
            if isinstance(leaf, Tensor):
                self.register_buffer(f"target{k}", leaf.detach())  # buffers move with the layer

    def forward(self, output: Any) -> Any:
        leaves, tree = flatten(self._target)
        leaves = [self._buffers.get(f"target{k}", leaf) for k, leaf in enumerate(leaves)]
        loss = self.loss_fn(output, unflatten(leaves, tree))
        while isinstance(loss, tuple):
            loss = loss[0]
        return loss


def with_loss(chain: nn.Sequential, loss_fn: LossFunction, target: Any) -> nn.Sequential:
    longer = nn.Sequential()
    name = "loss" if "loss" not in chain._modules else f"loss of {len(chain)} layers"
    longer._modules.update({**chain._modules, name: LossLayer(loss_fn, target)})
    return longer
