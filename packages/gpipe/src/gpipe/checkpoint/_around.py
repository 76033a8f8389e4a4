"""The hooks of layers and the modules in them, which a recomputation has to find as its forward did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import nn


class Around:
    """The current hooks of ``root`` and of all modules in it, and the identities of these modules.

    A recomputation with others may give the same output, but other gradients.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        every = [*root.modules()]
        self._children = [(module, dict(module._modules)) for module in every if module._modules]
        self._hooks = [(own, dict(own)) for module in every for own in _hooks(module)]

    def expect_same_modules(self) -> None:
        """Raise RuntimeError if a module in another one has been replaced; the message names the outer one."""
        changed = [module for module, then in self._children if module._modules != then]
        if changed:
            names = ", ".join(repr(name) for name, module in self._root.named_modules() if module in changed)
            raise RuntimeError(
                f"the modules in {names} were replaced between the forward and the backward of a checkpointed run, "
                "whose recomputation would now train others; do that after backward(), or use checkpoint='never'"
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the hooks are those of the forward. What has changed is looked up in the first use."""
        now = [dict(own) for own, _ in self._changed]
        _fill(self._changed)
        try:
            yield
        finally:
            _fill([(own, hooks) for (own, _), hooks in zip(self._changed, now, strict=True)])

    @cached_property
    def _changed(self) -> list[tuple[dict[int, Any], dict[int, Any]]]:
        return [(own, then) for own, then in self._hooks if own != then]


def _fill(hooks: list[tuple[dict[int, Any], dict[int, Any]]]) -> None:
    for own, then in hooks:
        own.clear()
        own.update(then)


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
