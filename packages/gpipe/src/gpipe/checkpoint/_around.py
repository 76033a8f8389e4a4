"""The hooks of layers and the modules in them, which a recomputation has to find as its forward did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn


class Around:
    """The current hooks of ``root`` and of all modules in it, and the identities of these modules.

    A recomputation with others may give the same output, but other gradients.

    Stages may share a module, and one may add hooks to it for as long as it computes. So the hooks are read, here and
    in :meth:`compare`, while no stage computes.

    Args:
        root: the layers of a stage.
        lock: the same for all stages of a run; held while hooks of the forward are in place of others.
    """

    def __init__(self, root: nn.Module, lock: AbstractContextManager[Any]) -> None:
        self._root = root
        self._lock = lock
        self._changed: list[tuple[dict[int, Any], dict[int, Any]]] = []
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

    def compare(self) -> None:
        """Find out which hooks have changed since then, before the recomputations."""
        self._changed = [(own, then) for own, then in self._hooks if own != then]

    def restored(self) -> AbstractContextManager[None]:
        """A context in which the hooks are those of the forward."""
        return self._restored() if self._changed else nullcontext()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        with self._lock:
            now = [(own, dict(own)) for own, _ in self._changed]
            _fill(self._changed)
            try:
                yield
            finally:
                _fill(now)


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
