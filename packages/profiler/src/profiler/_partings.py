"""The nodes at which the paths of a gradient to the inputs of a layer and to its parameters part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch.autograd.graph import GradientEdge, Node

from ._allocations import AllocationTracker
from ._enter import is_entrance
from ._storages import storages
from ._turn import SEED


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
    entrances, inner, splits = _edges(start.node)
    if not entrances:
        return Parting(0, 0)
    if not splits:
        return None
    tracker, ends = AllocationTracker(), cast("list[GradientEdge]", [*entrances, *inner])
    handles = [leaf.register_hook(_apart) for leaf in entrances]  # type: ignore[no-untyped-call]
    try:
        with tracker:
            found = torch.autograd.grad(start, ends, SEED, retain_graph=True, allow_unused=True)
    except RuntimeError:  # such as a reentrant checkpoint, which cannot run for some inputs only
        return None
    finally:
        for handle in handles:
            handle.remove()
    left = {storage._cdata: storage.nbytes() for storage in storages(found[len(entrances) :])}
    return Parting(sum(left.values()), tracker.peak)


def _apart(gradient: torch.Tensor) -> torch.Tensor:
    """A copy if `gradient` is a view of a larger one, such as a part of a concatenation."""
    return gradient.clone() if gradient.layout is torch.strided and gradient._is_view() else gradient


def _edges(root: Node) -> tuple[list[torch.Tensor], list[GradientEdge], bool]:
    """The inputs; the edges into nodes that lead to inputs and to other leaves; whether the backward can be split
    there.
    """
    leads = _leads(root)
    entrances = [node for node in leads if is_entrance(node)]
    inner = [node for node in leads if leads[node] and not is_entrance(node)]
    parting = {node for node in inner if any(not leads[child] for child, _ in _children(node))}
    into = dict.fromkeys(edge for node in inner for edge in _children(node) if edge[0] in parting)
    splits = not any(map(_is_whole, parting)) and _ends_differ(parting, leads)
    return list(map(_leaf, entrances)), [GradientEdge(*edge) for edge in into], splits


def _is_whole(node: Node) -> bool:
    """Whether the node always computes all its gradients, so that it would do its work twice."""
    return hasattr(node, "_forward_cls") or "Rnn" in node.name()


def _ends_differ(parting: Iterable[Node], leads: dict[Node, bool]) -> bool:
    """Whether each parameter is reached from one of these nodes only; else its gradients would be added in another
    order.
    """
    ends = [end for node in parting for end in _ends(child for child, _ in _children(node) if not leads[child])]
    return len(set(ends)) == len(ends)


def _ends(nodes: Iterable[Node]) -> set[Node]:
    """The nodes without children below ``nodes``."""
    stack = list(nodes)
    seen = set(stack)
    while stack:
        fresh = {child for child, _ in _children(stack.pop())} - seen
        seen |= fresh
        stack += fresh
    return {node for node in seen if not node.next_functions}


def _leaf(entrance: Node) -> torch.Tensor:
    ((accumulation, _),) = _children(entrance)
    leaf: torch.Tensor = accumulation.variable  # type: ignore[attr-defined]
    return leaf


def _leads(root: Node) -> dict[Node, bool]:
    """All nodes below ``root``, and whether they lead to an input."""
    found: dict[Node, bool] = {}
    stack = [root]
    while stack:  # children first, without recursion: graphs are deep
        node = stack[-1]
        left = [child for child, _ in _children(node) if child not in found]
        if left and not is_entrance(node):
            stack += left
        else:
            found[stack.pop()] = is_entrance(node) or any(found[child] for child, _ in _children(node))
    return found


def _children(node: Node) -> Sequence[tuple[Node, int]]:
    return [(child, number) for child, number in node.next_functions if child is not None]
