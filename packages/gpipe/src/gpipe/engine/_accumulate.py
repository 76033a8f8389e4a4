"""Accumulate gradients over micro-batches outside ``.grad``, and add them once per run.

The hooks of a parameter then fire once per run with the sum over all micro-batches, as in the plain model. A gradient
that is scaled at the end of a run is not mixed with an earlier ``.grad``.

The ``AccumulateGrad`` node of a parameter may also have hooks, which Python can neither list nor remove. The node lives
as long as a graph of the parameter, or as long as e.g. ``DistributedDataParallel`` holds it. It need not run before the
gradient is complete: with :class:`GradientSums`, autograd returns the gradient instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from streams import waiting

from .._torch import find_used_by_graphs
from ..values._leaves import accumulate_gradient, is_custom, own_memory, storage_id
from . import _autograd_calls as _engine
from ._leaked_graphs import expect_unguarded
from ._scale import Scale, scale_gradient, scale_in_place


class GraphLeaves(NamedTuple):
    """Properties of the graph below some tensors."""

    leaves: list[Tensor]
    is_custom: bool
    """True if there are nodes written in Python, except the nodes that pass tensors into a stage."""
    hides: bool
    """True if a reentrant checkpoint or a pipe, with a backward of its own, may hide more leaves."""


def find_leaves(tensors: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> GraphLeaves:
    """Return the leaves below ``tensors`` except ``inputs``, in an order that depends only on the graph."""
    nodes = nodes_below(tensors)
    ends = [node for node in nodes if not node.next_functions]
    known = {id(tensor) for tensor in inputs}
    leaves = [leaf for node in ends if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in known]
    kinds = {type(node) for node in nodes}
    return GraphLeaves(leaves, any(map(is_custom, kinds)), any(kind.__name__ in _HIDING for kind in kinds))


_HIDING = ("CheckpointFunctionBackward", "PipelineBackwardBackward")


def nodes_below(tensors: Iterable[Tensor]) -> list[Node]:
    """Return the nodes of the graph below ``tensors``, in an order that depends only on the graph."""
    # A layer may return a leaf, such as a parameter. Its gradient edge is its AccumulateGrad node.
    known = dict.fromkeys(get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad)
    stack, nodes = list(known), list[Node]()
    while stack:
        node = stack.pop()
        nodes.append(node)
        for child, _ in node.next_functions:
            if child is not None and child not in known:
                known[child] = None
                stack.append(child)
    return nodes


class GradientSums:
    """Gradient sums of some leaves, outside ``.grad``. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._sums: dict[Tensor, Tensor] = {}

    def backward(
        self, roots: Sequence[Tensor], seeds: Sequence[Tensor], graph: GraphLeaves, inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Add the gradients that flow from ``roots`` to the leaves of ``graph``; return the gradients of ``inputs``.

        Hooks on the leaves must be safe to call with a part of the gradient.
        """
        flowing = [tensor for tensor in inputs if tensor.requires_grad]
        # A custom Function may overwrite a gradient after returning it for a leaf.
        with on_arrival(graph.leaves if graph.is_custom else (), _copy):
            found = _engine.gradients(roots, seeds, [*flowing, *graph.leaves], keep_graph=False)
        own = found[len(flowing) :]
        add_to(self._sums, zip(graph.leaves, own, strict=True))
        # Both terms of a sum receive one gradient. The previous stage may overwrite its input's gradient, but must not
        # change the sum of a parameter.
        sent = map(accumulate_gradient, own_memory(found[: len(flowing)], own), flowing)
        return [next(sent) if tensor.requires_grad else None for tensor in inputs]

    def accumulate(self, roots: Sequence[Any], gradients: Sequence[Tensor], ends: Sequence[Tensor]) -> None:
        found = _engine.gradients(roots, gradients, ends, keep_graph=False)
        add_to(self._sums, zip(ends, found, strict=True))

    @property
    def leaves(self) -> list[Tensor]:
        return [*self._sums]

    def storages(self) -> set[int]:
        return set(map(storage_id, self._sums.values()))

    def take(self, scale: Scale = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
        # Reset before the first one is used, so that a later run adds nothing again after an interrupt.
        sums, self._sums = self._sums, {}
        for leaf, gradient in sums.items():
            yield leaf, scale_gradient(gradient, scale)


def add_to(sums: dict[Tensor, Tensor], gradients: Iterable[tuple[Tensor, Tensor | None]]) -> dict[Tensor, Tensor]:
    """Add ``gradients`` of leaves to ``sums``, and return it."""
    for leaf, gradient in gradients:
        if gradient is not None:
            # Out of place, because the first gradient may be shared: both terms of a sum receive the same tensor.
            sums[leaf] = add(sums[leaf], gradient) if leaf in sums else gradient
    return sums


def add(a: Tensor, b: Tensor) -> Tensor:
    # Torch cannot add a dense tensor to a sparse one.
    return a + b if b.is_sparse else b + a


@contextmanager
def on_arrival(leaves: Sequence[Tensor], change: Callable[..., Tensor | None]) -> Iterator[None]:
    """Replace each gradient that arrives at one of ``leaves`` by ``change(gradient, leaf)``."""
    handles = [leaf.register_hook(partial(change, leaf=leaf)) for leaf in leaves]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copy(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """Clone ``gradient``, which is None if a custom Function returns None."""
    return None if gradient is None else gradient.clone()


Hooks = dict[int, Any]
"""Hooks that are called when a gradient arrives at a leaf, or after its accumulation."""


class HeldLeaf(NamedTuple):
    """A leaf whose ``.grad`` and hooks are removed.

    Attributes:
        grad: its ``.grad`` before the run.
        hooks: its dicts of hooks, each with its original content.
        ends: whether the gradient of this run simply stays in ``.grad``, as there are no hooks to call and no other
            gradients to add.
    """

    leaf: Tensor
    grad: Tensor | None
    hooks: list[tuple[Hooks, Hooks]]
    ends: bool


class DeferredGradients:
    """Removes ``.grad`` and hooks of leaves for one run, while their gradients accumulate over micro-batches.

    :meth:`hold` a leaf before any stage adds to its gradient.
    """

    def __init__(self) -> None:
        self._lock = waiting.Lock()
        self._held: dict[int, HeldLeaf] = {}

    def hold(self, leaves: Iterable[Tensor], *, every: bool = False, tied: bool = False) -> None:
        """Remove ``.grad`` and hooks of the ``leaves`` that have hooks; of all leaves with ``every`` or ``tied``.

        Other stages also contribute to the gradients of ``tied`` leaves.
        """
        # Several stages, on different workers, and the loss may use the same leaf.
        with self._lock:
            for leaf in leaves:
                if (every or tied or any(_HOOKS(leaf))) and id(leaf) not in self._held:
                    expect_unguarded(leaf)
                    hooks = [(own, dict(own)) for own in _HOOKS(leaf) if own]
                    self._held[id(leaf)] = HeldLeaf(
                        leaf, leaf.grad, hooks, not (tied or hooks or leaf.grad is not None)
                    )
                    leaf.grad = None
                    # Autograd reads these dicts each time it calls hooks, so emptying them is enough.
                    for own, _ in hooks:
                        own.clear()

    def give_back(self, scale: Scale = 1.0, *, failed: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Restore ``.grad`` and hooks; return the leaves that have a gradient, with ``scale`` times the gradient.

        A gradient that simply stays in ``.grad`` is not returned. If the run has ``failed``, gradients are dropped.
        """
        gradients = []
        while self._held:  # one at a time: after an interrupt, this is called again
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


def find_kept(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the ``parameters`` whose ``AccumulateGrad`` node outlives a run, because a hook or graph refers to it."""
    # A node refers to its parameter, so a parameter with only one reference has no node. This excludes most of them.
    several = dict.fromkeys(find_used_by_graphs(parameters))  # no duplicates, although stages may share parameters
    return [p for p in several if p.requires_grad and _is_kept(p)]


def _is_kept(parameter: Tensor) -> bool:
    """Return whether the node survives if this function drops its reference."""
    if _MARK not in _metadata(parameter):
        # If nothing else refers to the node, it and its metadata are freed after this expression, and the next one
        # creates a new node.
        _metadata(parameter)[_MARK] = True
        return _MARK in _metadata(parameter)
    return True


_MARK = "gpipe: seen before"


def _metadata(parameter: Tensor) -> dict[str, object]:
    return cast("dict[str, object]", get_gradient_edge(parameter).node.metadata)
