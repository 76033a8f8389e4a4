"""What the caller must not change between a checkpointed forward and its backward: modes, hooks, modules, parameters.

A recomputation with others may give the same output, and other gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._fsdp import fsdp_modules

Key = tuple[str, str]
"""What is compared, in words, and the name of the module or parameter."""


class LayersThen:
    """The layers below ``root`` when all forwards are done.

    Stages may share a module, and one may add hooks to it for as long as it computes. So this is made, and compared,
    while no stage computes.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._then = _seen(root)

    def expect_same(self) -> None:
        """Raise RuntimeError that says what has changed since then, and where."""
        now = _seen(self._root)
        found = [key for key in {**self._then, **now} if now.get(key) != self._then.get(key)]
        if found:
            # The first kind and the outermost modules only: a layer that was replaced has other hooks and modules too.
            kind = min(found, key=lambda key: _KINDS.index(key[0]))[0]
            where = {name for each, name in found if each == kind}
            inner = {name for name in where if not where.isdisjoint(_around(name))}
            names = ", ".join(map(repr, sorted(where - inner)))
            raise RuntimeError(
                f"{kind.format(names)} between the forward and the backward of a checkpointed run, whose recomputation "
                "would now compute something else; do that after backward(), or use checkpoint='never'"
            )


_REPLACED = "layer {} was replaced or moved to another partition"
_MODES = "train() or eval() was called on {}"
_HOOKS = "hooks of {} were added or removed"
_PARAMETERS = "{} changed"
_KINDS = (_REPLACED, _MODES, _HOOKS, _PARAMETERS)


def _around(name: str) -> list[str]:
    """The names of the modules around the one of this ``name``."""
    return [name[:end] for end, letter in enumerate(name) if letter == "."]


def _seen(root: nn.Module) -> dict[Key, Any]:
    seen: dict[Key, Any] = {}
    # FSDP's hooks give parameters other memory.
    sharded = {module for each in fsdp_modules(root) for module in each.modules()}
    for name, module in root.named_modules():
        seen[_REPLACED, name] = module
        seen[_MODES, name] = module.training
        seen[_HOOKS, name] = [dict(hooks) for hooks in _hooks(module)]
        for own, parameter in {} if module in sharded else module._parameters.items():
            seen[_PARAMETERS, f"{name}.{own}".lstrip(".")] = _ground(parameter)
    return seen


def _ground(parameter: Tensor | None) -> Any:
    """The memory of a parameter, which ``.data = ...`` changes without a trace, and whether it is trained."""
    if parameter is None:
        return None
    is_plain = parameter.layout is torch.strided and not is_lazy(parameter)
    return parameter.untyped_storage()._cdata if is_plain else 0, parameter.requires_grad


def _hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The dicts of hooks of ``module``, and those that say which hooks are called with keywords, or always."""
    return (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
