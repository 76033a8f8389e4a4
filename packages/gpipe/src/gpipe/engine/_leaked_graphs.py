"""Reject gradients that enter a cell's graph other than through its stage's outputs.

A layer may store a tensor with its graph in an attribute, a list or a global. The graph of a cell begins at its inputs,
so the previous stages would not receive that gradient. Such a place also holds only one of several micro-batches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .._current import current
from ..checkpoint._state import last_entry
from ._stage import Stage

_KEY: Final = -1
"""The key of a guard among the hooks of a tensor. Torch numbers its hooks from 0."""


def guard(stage: Stage, tensors: Iterable[Tensor], microbatch: int | None = None, attribute: str = "") -> None:
    """Make a gradient that arrives at ``tensors`` raise RuntimeError, unless a cell of ``stage`` computes it.

    Only the cell of ``microbatch``, which begins at these tensors, may compute it, or any cell if an ``attribute``
    holds them. Call this after the forward, because layers may read the hooks of their inputs.
    """
    check = partial(_check, stage, microbatch, attribute)
    for tensor in tensors:
        if tensor.requires_grad:
            if tensor.is_leaf and tensor._backward_hooks is None:
                # Equivalent to register_hook, but without creating a handle, which takes as long as a small layer.
                tensor._backward_hooks = OrderedDict([(_KEY, check)])
            else:
                tensor.register_hook(check)  # type: ignore[no-untyped-call]


def _check(stage: Stage, microbatch: int | None, attribute: str, _: Tensor | None = None) -> None:
    step, now = current.work.step, current.work.microbatch
    # A loss is computed in steps of the last stage, but belongs to none of its micro-batches.
    if step is not None and step.stage == stage.index and now is not None and microbatch in (None, now):
        return
    what = f"'{attribute}' holds a tensor" if attribute else "a layer has left a tensor"
    raise RuntimeError(
        f"in partition {stage.index} (layers {stage.layers}) {what} with its graph of one micro-batch, and a loss, "
        "another micro-batch or partition, or the code around the pipe uses it; its gradient would not reach all rows "
        "and layers. Return it from the layer, and through all later layers, or leave its detach()"
    )


def refuse_in_runs(leaf: Tensor, why: str) -> RemovableHandle:
    """Make a gradient that arrives at ``leaf`` in a run raise RuntimeError, until the handle is removed."""
    return leaf.register_hook(partial(_refuse, why))  # type: ignore[no-untyped-call, no-any-return]


def _refuse(why: str, _: Tensor | None = None) -> None:
    if current.work.step is not None:
        raise RuntimeError(why)


def watch_attributes(stage: Stage) -> None:
    """Guard tensors with a graph in attributes of layers, for a ``stage`` whose inputs need no gradient or guard."""
    for name, module in stage.module.named_modules():
        for attribute, tensor in _with_graph(vars(module).items()):
            guard(stage, [tensor], attribute=f"{name}.{attribute}")


def expect_unguarded(leaf: Tensor) -> None:
    """Raise RuntimeError if a different stage guards ``leaf``. Call this before its hooks are removed."""
    # Accumulation outside .grad removes the hooks of leaves first, including this guard.
    for hook in (leaf._backward_hooks or {}).values():
        if getattr(hook, "func", None) in (_check, _refuse):
            hook(leaf)


def expect_no_variables(before: Context) -> None:
    """Raise RuntimeError if layers have set a context variable of this thread to a tensor with its graph."""
    # The loss, the other stages and the caller read a different value, so that no guard would detect the error.
    changed = ((each.name, value) for each, value in copy_context().items() if before.get(each) is not value)
    for name, _ in _with_graph(changed):
        raise RuntimeError(
            f"a layer has left a tensor with its graph in the context variable '{name}', which only its own thread "
            "sees. Return it from the layer, and through all later layers, leave its detach(), or reset the variable"
        )


def _with_graph(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    for name, value in items:
        # Only the last entry, so that the cost does not depend on the length of a list.
        last = last_entry(value)
        if isinstance(last, Tensor) and last.grad_fn is not None:
            yield name, last
