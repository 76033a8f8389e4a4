"""The bytes of the first part of a split backward."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch.autograd.graph import GradientEdge

from ._allocations import AllocationTracker
from ._enter import is_entrance
from ._storages import storages
from ._turn import SEED
from .split import BackwardGraph


class Parting(NamedTuple):
    """Bytes of the first part of a split backward, beside what the forward saved.

    Attributes:
        left: bytes of the gradients that are kept for the second part.
        peak: the peak of the first part.
    """

    left: int
    peak: int


def partings(root: torch.Tensor) -> Parting | None:
    """Computes the first part of a split backward from ``root``; None if the backward cannot be split."""
    assert root.grad_fn is not None
    start = GradientEdge(root.grad_fn, 0)  # an edge instead of the tensor, since there is no edge of a fake tensor
    graph = BackwardGraph([start])
    entrances = [node.next_functions[0][0] for node in graph.nodes if is_entrance(node)]
    leaves: list[torch.Tensor] = [node.variable for node in entrances]  # type: ignore[union-attr]
    if not leaves:
        return Parting(0, 0)
    branches = graph.branches({id(leaf) for leaf in leaves})
    if branches is None:
        return None
    tracker, edges = AllocationTracker(), [edge for branch in branches for edge in branch.edges]
    ends = cast("list[GradientEdge]", [*leaves, *edges])
    handles = [leaf.register_hook(_apart) for leaf in leaves]  # type: ignore[no-untyped-call]
    try:
        with tracker:
            found = torch.autograd.grad(start, ends, SEED, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    left = {storage._cdata: storage.nbytes() for storage in storages(found[len(leaves) :])}
    return Parting(sum(left.values()), tracker.peak)


def _apart(gradient: torch.Tensor) -> torch.Tensor:
    """A copy if `gradient` is a view of a larger one, such as a part of a concatenation."""
    return gradient.clone() if gradient.layout is torch.strided and gradient._is_view() else gradient
