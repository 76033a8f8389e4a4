"""What is below a module, found faster than by ``module.modules()``, which makes up names."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class Contents(NamedTuple):
    """A module and all modules below it, with what they hold.

    Attributes:
        modules: each once, in order.
        parameters: each once.
        tensors: the identities of parameters and buffers.
    """

    modules: dict[nn.Module, None]
    parameters: list[nn.Parameter]
    tensors: set[int]


def contents_of(root: nn.Module) -> Contents:
    modules: dict[nn.Module, None] = {}
    parameters: dict[int, nn.Parameter] = {}
    buffers: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        each = stack.pop()
        if each is not None and each not in modules:
            modules[each] = None
            stack += reversed(each._modules.values())
            parameters.update(zip(map(id, each._parameters.values()), each._parameters.values(), strict=True))
            buffers.update(map(id, each._buffers.values()))
    parameters.pop(id(None), None)
    return Contents(modules, [*parameters.values()], buffers.union(parameters) - {id(None)})
