"""Accumulate gradients outside ``.grad`` over micro-batches, without calling hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..values._leaves import accumulated, is_custom, own_memory
from . import _autograd_calls as _engine
from ._scale import Scale, scaled


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
    roots = [tensor.grad_fn or get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad]
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
        self._add(graph.leaves, own)
        # Both terms of a sum have one gradient: the stage before may overwrite what it gets, but not the sum of a
        # parameter.
        sent = map(accumulated, own_memory(found[: len(flowing)], own), flowing)
        return [next(sent) if tensor.requires_grad else None for tensor in inputs]

    def accumulate(self, roots: Sequence[Any], gradients: Sequence[Tensor], ends: Sequence[Tensor]) -> None:
        self._add(ends, _engine.gradients(roots, gradients, ends, keep_graph=False))

    def take(self, scale: Scale = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
        # Before the first one is used: after an interrupt nothing is left that a later run would add again.
        sums, self._sums = self._sums, {}
        for leaf, gradient in sums.items():
            yield leaf, scaled(gradient, scale)

    def _add(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                # Not in place: the first gradient may be shared, since both terms of a sum have one gradient.
                self._sums[leaf] = added(self._sums[leaf], gradient) if leaf in self._sums else gradient


def added(a: Tensor, b: Tensor) -> Tensor:
    # Torch refuses to add a dense tensor to a sparse one.
    return b + a if a.is_sparse and not b.is_sparse else a + b


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
