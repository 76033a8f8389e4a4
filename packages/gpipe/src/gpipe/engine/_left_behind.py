"""Refuse gradients that enter the graph of a cell other than through the outputs of its stage.

A layer may leave a tensor with its graph in an attribute, a list or a global, for others to use. The graph of a cell
begins at its inputs, so the stages before would miss that gradient; and such a place holds one of several
micro-batches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from .._current import current
from ..checkpoint._state import last_entry

if TYPE_CHECKING:
    from ._stage import Stage

_KEY: Final = -1
"""The key of a guard among the hooks of a tensor: those of others are numbered from 0."""


class Guard:
    """A hook of tensors that raises RuntimeError unless a cell of ``stage`` is at work on this thread."""

    def __init__(self, stage: Stage, attribute: str = "") -> None:
        self._stage, self._attribute = stage, attribute

    def __call__(self, _: Tensor | None = None) -> None:
        step = current.step
        # A loss is computed in steps of the last stage, but belongs to no micro-batch there.
        if step is not None and step.stage == self._stage.index and current.microbatch is not None:
            return
        what = f"'{self._attribute}' holds a tensor" if self._attribute else "a layer has left a tensor"
        raise RuntimeError(
            f"in partition {self._stage.index} (layers {self._stage.layers}) {what} with its graph of one micro-batch, "
            "and a loss, another partition or the code around the pipe uses it; its gradient would not reach all rows "
            "and layers. Return it from the layer, and through all later layers, or leave its detach()"
        )

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Guard the ``tensors``, at which a cell begins. Call this after the forward: layers may see hooks."""
        for tensor in tensors:
            if tensor.requires_grad:
                if tensor.is_leaf and tensor._backward_hooks is None:
                    # As register_hook does, without a handle to remove it, which takes as long as a small layer.
                    tensor._backward_hooks = OrderedDict([(_KEY, self)])
                else:
                    tensor.register_hook(self)  # type: ignore[no-untyped-call]


def watch_attributes(stage: Stage) -> None:
    """Guard what layers hold with a graph: where the inputs of ``stage`` need no gradient, no guard is at them."""
    for name, module in stage.module.named_modules():
        for attribute, tensor in _with_graph(vars(module).items()):
            Guard(stage, f"{name}.{attribute}").watch([tensor])


def expect_unguarded(leaf: Tensor) -> None:
    """Raise RuntimeError if ``leaf`` is guarded by another stage. Call this before its hooks are removed."""
    # Whoever accumulates outside .grad removes the hooks of leaves first, and with them this guard.
    for hook in (leaf._backward_hooks or {}).values():
        if isinstance(hook, Guard):
            hook()


def expect_no_variables(before: Context) -> None:
    """Raise RuntimeError if layers have set a context variable of this thread to a tensor with its graph."""
    # The loss, the other stages and the caller read another value, and there is no guard where nobody looks.
    changed = ((each.name, value) for each, value in copy_context().items() if before.get(each) is not value)
    for name, _ in _with_graph(changed):
        raise RuntimeError(
            f"a layer has left a tensor with its graph in the context variable '{name}', which only its own thread "
            "sees. Return it from the layer, and through all later layers, leave its detach(), or reset the variable"
        )


def _with_graph(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for name, value in items:
        # One entry only, so that a look costs the same for a list of any length.
        last = last_entry(value)
        if isinstance(last, Tensor) and last.grad_fn is not None:
            yield name, last
