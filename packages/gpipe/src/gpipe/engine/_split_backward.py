"""A backward in two parts: the gradients of the inputs first, those of the weights later.

:mod:`profiler.split` finds the nodes at which they part. The first part keeps the gradients that arrive there, and the
second part starts from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from profiler.split import BackwardGraph, Branch

from ..values._leaves import is_custom, like_accumulated, own_memory
from . import _autograd_calls as _engine
from ._accumulate import GradientSums

Gradients = list[Tensor | None]


class Weights(NamedTuple):
    """The rest of the backward at such a node: the gradients of parameters."""

    branch: Branch
    gradients: Gradients
    hooked: bool
    """Whether the gradients have passed the hooks of the tensor that they belong to."""

    def backward(self, sums: GradientSums | None = None) -> None:
        """Accumulate the gradients of the parameters in ``.grad``, or in ``sums``."""
        pairs = zip(self.branch.edges, self.gradients, strict=True)
        flowing = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if not flowing:
            return
        edges, gradients = zip(*flowing, strict=True)
        with _replaced(flowing) if self.hooked else nullcontext():
            accumulate = _engine.accumulate_in if sums is None else sums.accumulate
            accumulate(edges, gradients, self.branch.parameters)


@contextmanager
def _replaced(flowing: Sequence[tuple[GradientEdge, Tensor]]) -> Iterator[None]:
    """A context in which a node uses the gradients in ``flowing``, whatever hooks of tensors return."""
    handle = flowing[0][0].node.register_prehook(partial(_put, flowing))
    try:
        yield
    finally:
        handle.remove()


def _put(flowing: Sequence[tuple[GradientEdge, Tensor]], gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """``gradients`` of all outputs of a node, with those in ``flowing`` put in their places."""
    own = {edge.output_nr: gradient for edge, gradient in flowing}
    return tuple([own.get(number, gradient) for number, gradient in enumerate(gradients)])


def backward_inputs(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[Gradients, list[Weights]] | None:
    """The first part of a split backward.

    Args:
        outputs: the outputs of a cell that have a gradient.
        seeds: these gradients.
        leaves: the inputs of the cell.

    Returns:
        The gradients of ``leaves``, and what is left for the second part; None if the backward cannot be split.
    """
    graph = BackwardGraph([get_gradient_edge(output) for output in outputs])
    branches = graph.branches({id(leaf) for leaf in leaves})
    if branches is None:
        return None
    edges = [edge for branch in branches for edge in branch.edges]
    # Nodes written in Python, other than those through which tensors enter a stage.
    custom = any(map(is_custom, {type(node) for node in graph.nodes}))
    with _copied(edges if custom else ()) as copies, _apart(leaves):
        found = _engine.gradients(outputs, seeds, [*leaves, *edges])
    arrived = iter(copies if custom else found[len(leaves) :])
    weights = [Weights(branch, [next(arrived) for _ in branch.edges], hooked=custom) for branch in branches]
    return own_memory(found[: len(leaves)], [gradient for each in weights for gradient in each.gradients]), weights


@contextmanager
def _apart(leaves: Sequence[Tensor]) -> Iterator[None]:
    """A context for the first part, in which the gradients of several leaves have memory of their own.

    Without it the gradient of a skip, which is often concatenated with another tensor, would be a view that keeps the
    gradient of the whole alive.
    """
    several = leaves if len(leaves) > 1 else ()
    handles = [leaf.register_hook(partial(like_accumulated, leaf=leaf)) for leaf in several]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _copied(edges: Sequence[GradientEdge]) -> Iterator[Gradients]:
    """A context for the first part, that copies the gradients at ``edges`` when they arrive. Use them after its end.

    A custom Function may overwrite the gradient that it gets. In an ordinary backward the parameters would have used it
    by then.
    """
    copies: Gradients = []
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}

    def keep(node: Node, gradients: tuple[Tensor | None, ...]) -> None:
        arrived[node] = tuple([None if gradient is None else gradient.clone() for gradient in gradients])

    handles = [node.register_prehook(partial(keep, node)) for node in dict.fromkeys(edge.node for edge in edges)]
    try:
        yield copies
    finally:
        for handle in handles:
            handle.remove()  # the second part starts at the same nodes, and must not copy again
    copies += [arrived[edge.node][edge.output_nr] if edge.node in arrived else None for edge in edges]
