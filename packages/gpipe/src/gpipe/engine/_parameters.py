"""The parameters of layers, which every run needs several times."""

from __future__ import annotations

from torch import nn


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """As ``list(module.parameters())``, which takes several times as long because it makes up names."""
    found: dict[int, nn.Parameter] = {}
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        each = stack.pop()
        if each not in seen:
            seen.add(each)
            found.update({id(p): p for p in each._parameters.values() if p is not None})
            stack += [child for child in reversed(each._modules.values()) if child is not None]
    return list(found.values())
