"""The modules and parameters below a module, found faster than by ``module.modules()``, which makes up names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def modules_below(root: nn.Module) -> dict[nn.Module, None]:
    found: dict[nn.Module, None] = {}
    stack: list[Any] = [root]
    while stack:
        each = stack.pop()
        if each is not None and each not in found:
            found[each] = None
            stack += reversed(each._modules.values())
    return found


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of ``modules``, each once."""
    own = [parameter for each in modules for parameter in each._parameters.values()]
    return list({id(parameter): parameter for parameter in own if parameter is not None}.values())
