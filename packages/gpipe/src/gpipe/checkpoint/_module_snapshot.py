"""Detect changes between a checkpointed forward and its backward: modules, modes, hooks, parameters.

After such a change, a recomputation may return the same output, but different gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._fsdp import fsdp_modules


class ModuleSnapshot:
    """The layers below ``root`` when all forwards have finished.

    Stages may share a module, and one of them may add hooks to it while it computes. So this object is created, and
    compared, while no stage computes.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._then = _seen(root)

    def expect_same(self) -> None:
        now = _seen(self._root)
        for kind, then in self._then.items():  # only the first kind: a replaced layer also has different hooks
            names = [name for name in {**then, **now[kind]} if now[kind].get(name) != then.get(name)]
            if names:
                outermost = ", ".join(map(repr, [*filter(None, names)][:3]))
                raise RuntimeError(
                    f"{kind.format(outermost)} between the forward and the backward of a "
                    "checkpointed run, whose recomputation would now compute something else; do that after "
                    "backward(), or use checkpoint='never'"
                )


def _seen(root: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the state to compare, by kind of change and name."""
    modules = dict(root.named_modules())
    # FSDP's hooks replace the memory of parameters.
    sharded = {module for each in fsdp_modules(root) for module in each.modules()}
    owned = [item for item in modules.items() if item[1] not in sharded]
    return {
        "layer {} was replaced or moved to another partition": modules,
        "train() or eval() was called on {}": {name: module.training for name, module in modules.items()},
        "hooks of {} were added or removed": {name: _hooks(module) for name, module in modules.items()},
        "{} changed": {
            f"{name}.{own}".lstrip("."): _ground(parameter)
            for name, module in owned
            for own, parameter in module._parameters.items()
        },
    }


def _ground(parameter: Tensor | None) -> Any:
    """Identify the memory of a parameter, which ``.data = ...`` replaces without a trace, and its ``requires_grad``."""
    if parameter is None:
        return None
    # Sparse and lazy parameters have no single storage, so that only a change of requires_grad is detected.
    is_plain = parameter.layout is torch.strided and not is_lazy(parameter)
    return parameter.untyped_storage()._cdata if is_plain else 0, parameter.requires_grad


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    found = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    # Copied, because hooks are added to and removed from these dicts in place.
    return [*map(dict, found)]
