"""Generate tokens with the model of a pipe, whose modules are on the devices of the stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ._called import answered_by


def generate(model: Any, blocks: Collection[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Return the result of ``model.generate(*args, **kwargs)``. The stages take turns on the full batch.

    If threads computed groups of rows, stages would overlap. But each group would read every weight and launch every
    kernel again.
    """
    first = next(model.parameters(), None)
    if first is not None:
        args, kwargs = _move(args, first.device), _move(kwargs, first.device)
    with answered_by(None), _across_devices(model, blocks):
        return model.generate(*args, **kwargs)


@contextmanager
def _across_devices(model: nn.Module, blocks: Collection[nn.Module]) -> Iterator[None]:
    """Let modules of ``model`` accept inputs on any device in this context.

    Modules other than ``blocks`` move their output to the device of their input, so that the outputs of two modules are
    on the same device when the model combines them.
    """
    with ExitStack() as scope:
        for module, device in _find_placed_modules(model):
            visit = _Move(device, returns=module not in blocks)
            scope.callback(module.register_forward_pre_hook(visit.begin, with_kwargs=True, prepend=True).remove)
            scope.callback(module.register_forward_hook(visit.end).remove)
        yield


def _find_placed_modules(module: nn.Module) -> Iterator[tuple[nn.Module, torch.device]]:
    """Yield the outermost modules inside ``module`` that are on a single device, and that device."""
    for child in module.children():
        devices = {tensor.device for tensor in chain(child.parameters(), child.buffers())}
        if len(devices) == 1 and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # these are not called
            yield child, devices.pop()
        else:
            yield from _find_placed_modules(child)


class _Move:
    """Hooks that move the inputs of a module to ``device``, and its output back if it ``returns``."""

    def __init__(self, device: torch.device, *, returns: bool) -> None:
        self._device = device
        self._returns = returns
        self._origins: list[torch.device] = []

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._origins.append(given[0].device if given and self._returns else self._device)
        return _move(args, self._device), _move(kwargs, self._device)

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _move(output, self._origins.pop())


def _move(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``. A cache stays, because it spans the devices of all layers."""
    move = lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf  # noqa: E731
    return _pytree.tree_map(move, value, is_leaf=lambda part: not isinstance(part, (tuple, list, dict)))
