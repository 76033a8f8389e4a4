"""Accumulate gradients outside ``.grad`` and add them once per run.

So the hooks of a parameter fire once a run, with the sum over all micro-batches, as in the plain model; and a gradient
that is scaled at the end of a run is not mixed with one that was in ``.grad`` before.

The ``AccumulateGrad`` node of a parameter may have hooks too, which Python can neither list nor remove; it lives as
long as a graph with the parameter, or a reference such as that of ``DistributedDataParallel``. But it need not run
before the gradient is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .._torch import used_by_graphs
from ._accumulate import added
from ._left_behind import expect_unguarded
from ._scale import Scale, scale_in_place

Hooks = dict[int, Any]
"""The hooks that are called when a gradient arrives at a leaf, or has been accumulated."""


class DeferredGradients:
    """Removes ``.grad`` and the hooks of leaves for one run, while their gradients accumulate over micro-batches.

    :meth:`hold` a leaf before the first of the stages that use it adds to its gradient.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[Tensor, Tensor | None, list[tuple[Hooks, Hooks]]]] = {}

    def hold(self, leaves: Iterable[Tensor], *, every: bool = False) -> None:
        """Remove ``.grad`` and the hooks of those ``leaves`` that have hooks; with ``every``, of all."""
        # Stages on several workers, and the loss, may use one leaf.
        with self._lock:
            for leaf in leaves:
                if (every or any(_HOOKS(leaf))) and id(leaf) not in self._held:
                    expect_unguarded(leaf)
                    hooks = [(own, dict(own)) for own in _HOOKS(leaf) if own]
                    self._held[id(leaf)] = leaf, leaf.grad, hooks
                    leaf.grad = None
                    # Autograd looks into these dicts whenever it would call a hook, so emptying them is enough.
                    for own, _ in hooks:
                        own.clear()

    def give_back(self, scale: Scale = 1.0) -> list[tuple[Tensor, Tensor]]:
        """Put ``.grad`` and the hooks back; return the leaves that have a gradient, with ``scale`` times that."""
        gradients = []
        while self._held:  # one at a time, since an interrupt may come between, after which this is called again
            key, (leaf, before, hooks) = next(iter(self._held.items()))
            gradients.append((leaf, leaf.grad))
            leaf.grad = before
            for own, removed in hooks:
                own.update(removed)
            del self._held[key]
        return [(leaf, scale_in_place(gradient, scale)) for leaf, gradient in gradients if gradient is not None]


_HOOKS: Callable[[Tensor], tuple[Hooks | None, Hooks | None]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)


def counts_of_hooks(leaves: Iterable[Tensor]) -> list[int]:
    return [len(arriving or ()) + len(accumulated or ()) for arriving, accumulated in map(_HOOKS, leaves)]


def summed(gradients: Iterable[tuple[Tensor, Tensor]]) -> dict[Tensor, Tensor]:
    sums: dict[Tensor, Tensor] = {}
    for leaf, gradient in gradients:
        sums[leaf] = added(sums[leaf], gradient) if leaf in sums else gradient
    return sums


def kept(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those of ``parameters`` whose ``AccumulateGrad`` node outlives a run: a hook or another graph refers to it."""
    # A node refers to its parameter, so a parameter with one reference has none. That sorts out most of them.
    several = dict.fromkeys(used_by_graphs(parameters))  # each once, though stages may share it
    return [p for p in several if p.requires_grad and _is_kept(p)]


def _is_kept(parameter: Tensor) -> bool:
    """Whether the node survives when we drop our reference to it."""
    if _MARK not in _metadata(parameter):
        # If nothing else refers to the node, it and its metadata end with this expression, and the next one makes a new
        # node.
        _metadata(parameter)[_MARK] = True
        return _MARK in _metadata(parameter)
    return True


_MARK = "gpipe: seen before"


def _metadata(parameter: Tensor) -> dict[str, object]:
    return cast("dict[str, object]", get_gradient_edge(parameter).node.metadata)
