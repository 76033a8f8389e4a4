"""The hooks of layers and the modules in them, which a recomputation has to find as its forward did."""

from __future__ import annotations

from typing import Any

from torch import nn


class HookSnapshot:
    """The current hooks of ``root`` and of all modules in it, and the identities of these modules.

    A recomputation with others may give the same output, but other gradients.

    Stages may share a module, and one may add hooks to it for as long as it computes. So the hooks are read, here and
    in :meth:`change`, while no stage computes.

    Args:
        root: the layers of a stage.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        every = [*root.modules()]
        self._children = [(module, dict(module._modules)) for module in every if module._modules]
        self._hooks = [(module, own, dict(own)) for module in every for own in _hooks(module)]

    def change(self) -> str:
        """What has changed since then, as text; empty if nothing has."""
        replaced = [module for module, then in self._children if module._modules != then]
        if replaced:
            return f"the modules in {self._names(replaced)} were replaced"
        hooked = [module for module, own, then in self._hooks if own != then]
        return f"hooks of {self._names(hooked)} were added or removed" if hooked else ""

    def _names(self, modules: list[nn.Module]) -> str:
        return ", ".join(repr(name) for name, module in self._root.named_modules() if module in modules)


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
