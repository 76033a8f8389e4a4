"""Accumulate gradients outside ``.grad`` over micro-batches, and add them once per run.

So the hooks of a parameter fire once a run, with the sum over all micro-batches, as in the plain model; and a gradient
that is scaled at the end of a run is not mixed with one that was in ``.grad`` before.

The ``AccumulateGrad`` node of a parameter may have hooks too, which Python can neither list nor remove; it lives as
long as a graph with the parameter, or a reference such as that of ``DistributedDataParallel``. But it need not run
before the gradient is complete: :class:`GradientSums` has autograd return it instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .._torch import used_by_graphs
from ..values._leaves import accumulated, is_custom, own_memory, storage_id
from . import _autograd_calls as _engine
from ._left_behind import expect_unguarded
from ._scale import Scale, scale_in_place, scaled


class Below(NamedTuple):
    """What is below some tensors in their graph."""

    leaves: list[Tensor]
    is_custom: bool
    """Whether there are nodes written in Python, other than those through which tensors enter a stage."""
    hides: bool
    """Whether there may be other leaves, inside a reentrant checkpoint or a pipe, which have backwards of their own."""


def below(tensors: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> Below:
    """The leaves below ``tensors``, without ``inputs``, in an order that depends only on the graph."""
    # A layer may return a leaf, such as a parameter: its node is the one that accumulates its gradient.
    roots = [get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad]
    nodes = dict.fromkeys(roots)
    stack, ends = list(nodes), []
    while stack:
        node = stack.pop()
        children = node.next_functions
        if not children:
            ends.append(node)
        for child, _ in children:
            if child is not None and child not in nodes:
                nodes[child] = None
                stack.append(child)
    known = {id(tensor) for tensor in inputs}
    leaves = [leaf for node in ends if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in known]
    kinds = {type(node) for node in nodes}
    return Below(leaves, any(map(is_custom, kinds)), any(kind.__name__ in _HIDING for kind in kinds))


_HIDING = ("CheckpointFunctionBackward", "PipelineBackwardBackward")


class GradientSums:
    """The sums of the gradients of some leaves, outside ``.grad``. Used by one thread at a time."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}

    def backward(
        self, roots: Sequence[Tensor], seeds: Sequence[Tensor], graph: Below, inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Add the gradients that flow from ``roots`` to the leaves of ``graph``; return those of ``inputs``.

        The leaves must have no hooks but those that may be called for a part of the gradient.
        """
        flowing = [tensor for tensor in inputs if tensor.requires_grad]
        # A custom Function may overwrite a gradient later, after it has returned it for a leaf.
        with on_arrival(graph.leaves if graph.is_custom else (), _copy):
            found = _engine.gradients(roots, seeds, [*flowing, *graph.leaves], keep_graph=False)
        own = found[len(flowing) :]
        add_to(self._sums, zip(graph.leaves, own, strict=True))
        # Both terms of a sum have one gradient: the stage before may overwrite what it gets, but not the sum of a
        # parameter.
        sent = map(accumulated, own_memory(found[: len(flowing)], own), flowing)
        return [next(sent) if tensor.requires_grad else None for tensor in inputs]

    def accumulate(self, roots: Sequence[Any], gradients: Sequence[Tensor], ends: Sequence[Tensor]) -> None:
        found = _engine.gradients(roots, gradients, ends, keep_graph=False)
        add_to(self._sums, zip(ends, found, strict=True))

    def storages(self) -> set[int]:
        return set(map(storage_id, self._sums.values()))

    def take(self, scale: Scale = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
        # Before the first one is used: after an interrupt nothing is left that a later run would add again.
        sums, self._sums = self._sums, {}
        for leaf, gradient in sums.items():
            yield leaf, scaled(gradient, scale)


def add_to(sums: dict[Tensor, Tensor], gradients: Iterable[tuple[Tensor, Tensor | None]]) -> dict[Tensor, Tensor]:
    """``sums``, to which these ``gradients`` of leaves have been added."""
    for leaf, gradient in gradients:
        if gradient is not None:
            # Not in place: the first gradient may be shared, since both terms of a sum have one gradient.
            sums[leaf] = added(sums[leaf], gradient) if leaf in sums else gradient
    return sums


def added(a: Tensor, b: Tensor) -> Tensor:
    # Torch refuses to add a dense tensor to a sparse one.
    return a + b if b.is_sparse else b + a


@contextmanager
def on_arrival(leaves: Sequence[Tensor], change: Callable[..., Tensor | None]) -> Iterator[None]:
    """A context in which ``change(gradient, leaf)`` replaces a gradient that arrives at one of ``leaves``."""
    handles = [leaf.register_hook(partial(change, leaf=leaf)) for leaf in leaves]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copy(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """``gradient`` is None if a custom Function returns None."""
    return None if gradient is None else gradient.clone()


Hooks = dict[int, Any]
"""The hooks that are called when a gradient arrives at a leaf, or has been accumulated."""


class HeldLeaf(NamedTuple):
    """A leaf whose ``.grad`` and hooks are removed.

    Attributes:
        grad: that of before.
        hooks: its dicts of hooks, each with what was in it.
        ends: whether the leaf ends with the gradient of this run in ``.grad``, since nothing has to be added to it, or
            be called with it.
    """

    leaf: Tensor
    grad: Tensor | None
    hooks: list[tuple[Hooks, Hooks]]
    ends: bool


class DeferredGradients:
    """Removes ``.grad`` and the hooks of leaves for one run, while their gradients accumulate over micro-batches.

    :meth:`hold` a leaf before the first of the stages that use it adds to its gradient.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, HeldLeaf] = {}

    def hold(self, leaves: Iterable[Tensor], *, every: bool = False, tied: bool = False) -> None:
        """Remove ``.grad`` and the hooks of those ``leaves`` that have hooks; with ``every`` or ``tied``, of all.

        To the gradients of those that are ``tied`` others are added.
        """
        # Stages on several workers, and the loss, may use one leaf.
        with self._lock:
            for leaf in leaves:
                if (every or tied or any(_HOOKS(leaf))) and id(leaf) not in self._held:
                    expect_unguarded(leaf)
                    hooks = [(own, dict(own)) for own in _HOOKS(leaf) if own]
                    self._held[id(leaf)] = HeldLeaf(
                        leaf, leaf.grad, hooks, not (tied or hooks or leaf.grad is not None)
                    )
                    leaf.grad = None
                    # Autograd looks into these dicts whenever it would call a hook, so emptying them is enough.
                    for own, _ in hooks:
                        own.clear()

    def give_back(self, scale: Scale = 1.0, *, failed: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Put ``.grad`` and the hooks back; return the leaves that have a gradient, with ``scale`` times that.

        Where it is all of ``.grad`` it is there already, and not returned, unless the run has ``failed``.
        """
        gradients = []
        while self._held:  # one at a time, since an interrupt may come between, after which this is called again
            key, (leaf, before, hooks, ends) = next(iter(self._held.items()))
            found = None if leaf.grad is None or failed else scale_in_place(leaf.grad, scale)
            if found is not None and not ends:
                gradients.append((leaf, found))
            leaf.grad = found if ends else before
            for own, removed in hooks:
                own.update(removed)
            del self._held[key]
        return gradients


_HOOKS: Callable[[Tensor], tuple[Hooks | None, Hooks | None]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)


def counts_of_hooks(leaves: Iterable[Tensor]) -> list[int]:
    return [len(arriving or ()) + len(accumulated or ()) for arriving, accumulated in map(_HOOKS, leaves)]


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
