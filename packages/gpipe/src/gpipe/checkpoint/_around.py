"""The hooks of layers, and the modules in them, as a forward leaves them and its recomputation has to find them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import nn


class Around:
    """The hooks of ``root`` and of all modules in it, and which modules these are, now.

    A recomputation with other ones may give the same output, and other gradients.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        every = [*root.modules()]
        self._children = [(module, dict(module._modules)) for module in every if module._modules]
        self._hooks = [(own, dict(own)) for module in every for own in _hooks(module)]

    def expect_same_modules(self) -> None:
        """RuntimeError if one that is in another has been replaced, by the name of the other."""
        changed = [module for module, then in self._children if module._modules != then]
        if changed:
            names = ", ".join(repr(name) for name, module in self._root.named_modules() if module in changed)
            raise RuntimeError(
                f"the modules in {names} were replaced between the forward and the backward of a checkpointed run, "
                "whose recomputation would now train others; do that after backward(), or use checkpoint='never'"
            )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the hooks are those of then; which have changed is looked for the first time."""
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
    """The hooks of ``module`` by their numbers, and which of them are called with keywords, or always."""
    return (
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
