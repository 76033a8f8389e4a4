"""Let gradients grow out of sight until they are whole.

The hooks of a parameter fire once a run, with the whole gradient, as they do in the plain model. And a gradient that
can only be scaled at the end is not mixed with one that was there before.

Other hooks are on the node in autograd in which a parameter accumulates its gradient. It lives as long as a graph with
the parameter in it, or as somebody else who holds it: ``DistributedDataParallel`` does, to be called when the gradient
is there. Such hooks cannot be seen, nor taken away; but the node need not run before the gradient is whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ._accumulate import added
from ._scale import Scale, scale_in_place


class DeferredGradients:
    """Takes ``.grad`` and the hooks of leaves away while their gradient grows from micro-batch to micro-batch.

    One for a run. Several stages, and the loss, may reach a leaf: it is held before the first of them adds to it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}

    def hold(self, leaves: Iterable[Tensor], *, every: bool = False) -> None:
        """Hold those of ``leaves`` with hooks, or every one. Nobody must be adding to them just now."""
        with self._lock:
            for leaf in leaves:
                hooked = leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None)
                if (every or hooked) and id(leaf) not in self._held:
                    self._held[id(leaf)] = _Held(leaf)

    def give_back(self, scale: Scale = 1.0) -> list[tuple[Tensor, Tensor]]:
        """Let ``.grad`` and the hooks be as before; the leaves with ``scale`` times what has grown meanwhile."""
        if not self._held:
            return []
        held, self._held = self._held, {}
        grown = [(each.leaf, each.give_back()) for each in held.values()]
        return [(leaf, scale_in_place(g, scale)) for leaf, g in grown if g is not None]


def summed(grown: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """The leaves, each once, and the sums of their gradients."""
    sums: dict[Tensor, Tensor] = {}
    for leaf, gradient in grown:
        sums[leaf] = added(sums[leaf], gradient) if leaf in sums else gradient
    return list(sums), list(sums.values())


class _Held:
    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        self._grad, leaf.grad = leaf.grad, None
        # Autograd looks into these dicts whenever it would call a hook, so emptying them is enough.
        self._hooks = [(hooks, dict(hooks)) for hooks in _hooks(leaf)]
        for hooks, _ in self._hooks:
            hooks.clear()

    def give_back(self) -> Tensor | None:
        gradient, self.leaf.grad = self.leaf.grad, self._grad
        for hooks, own in self._hooks:
            hooks.update(own)
        return gradient


def _hooks(leaf: Tensor) -> Iterator[dict[int, Any]]:
    """The dicts of hooks that are called when a gradient arrives, and when it has been accumulated."""
    for hooks in (leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)):
        if hooks:
            yield hooks


def kept(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those of ``parameters`` whose nodes live between two runs: of hooks, or of a graph that is still to be used."""
    # A node holds its parameter, so most are told by a look at a counter.
    several = [p for p in parameters if p._use_count() > 1 and p.requires_grad]  # type: ignore[attr-defined]
    return [p for p in dict.fromkeys(several) if _is_kept(p)]  # each once, though stages may share it


def _is_kept(parameter: Tensor) -> bool:
    """Whether the node is still the one that was marked, after we have let it go."""
    if _MARK not in _metadata(parameter):
        _metadata(parameter)[_MARK] = True
        return _MARK in _metadata(parameter)
    return True


_MARK = "gpipe: seen before"


def _metadata(parameter: Tensor) -> dict[str, object]:
    return cast("dict[str, object]", get_gradient_edge(parameter).node.metadata)
