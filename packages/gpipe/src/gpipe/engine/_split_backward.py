"""Split a backward at the nodes that :mod:`profiler.split` finds: gradients of inputs first, of parameters later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..values._leaves import is_custom, like_accumulated, own_memory
from . import _autograd_calls as _engine
from ._accumulate import GradientSums, on_arrival

if TYPE_CHECKING:
    from profiler.split import Branch

Gradients = list[Tensor | None]


class Weights(NamedTuple):
    """The remaining backward at one of these nodes: the gradients of parameters."""

    branch: Branch
    gradients: Gradients

    def backward(self, sums: GradientSums | None = None) -> None:
        """Accumulate the gradients of the parameters in ``.grad``, or in ``sums``."""
        pairs = zip(self.branch.edges, self.gradients, strict=True)
        flowing = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if flowing:
            edges, gradients = zip(*flowing, strict=True)
            accumulate = _engine.accumulate_in if sums is None else sums.accumulate
            accumulate(edges, gradients, self.branch.parameters)


def backward_inputs(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[Gradients, list[Weights]] | None:
    """Return the gradients of ``leaves``, and the remaining second part; None if the backward cannot be split."""
    from profiler.split import BackwardGraph  # imported here, since few pipes split a backward

    graph = BackwardGraph([get_gradient_edge(output) for output in outputs])
    branches = graph.branches({id(leaf) for leaf in leaves})
    # A custom Function may overwrite its incoming gradient, which the second part would then start from.
    if branches is None or any(map(is_custom, {type(node) for node in graph.nodes})):
        return None
    edges = [edge for branch in branches for edge in branch.edges]
    # Gradients of several leaves get separate memory. Otherwise the gradient of a skip, which is often concatenated
    # with another tensor, would be a view that keeps the gradient of the concatenation alive.
    with on_arrival(leaves if len(leaves) > 1 else (), like_accumulated):
        # The graph is kept: the second part starts at the edges, and needs all nodes behind them.
        found = _engine.gradients(outputs, seeds, [*leaves, *edges])
    arrived = iter(found[len(leaves) :])
    weights = [Weights(branch, [next(arrived) for _ in branch.edges]) for branch in branches]
    return own_memory(found[: len(leaves)], [gradient for each in weights for gradient in each.gradients]), weights
