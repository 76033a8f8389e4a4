"""Where the way of a gradient to the inputs of a layer parts from its way to the parameters."""

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
    """What the part of a backward for the inputs takes, beside what the forward saved.

    Attributes:
        left: gradients that are there when it is done, and that the part for the weights starts from.
        peak: the most that it takes.
    """

    left: int
    peak: int


def partings(root: torch.Tensor) -> Parting | None:
    """Does the part for the inputs of a backward from ``root``; None if that part cannot be done alone."""
    assert root.grad_fn is not None
    start = GradientEdge(root.grad_fn, 0)  # not the tensor, of which no fake one can be made
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
    except RuntimeError:  # a reentrant checkpoint, for one, refuses to run for some inputs only
        return None
    finally:
        for handle in handles:
            handle.remove()
    left = {storage._cdata: storage.nbytes() for storage in storages(found[len(entrances) :])}
    return Parting(sum(left.values()), tracker.peak)


def _apart(gradient: torch.Tensor) -> torch.Tensor:
    """Not as a view of a larger gradient, as parts of what was joined have."""
    return gradient.clone() if gradient.layout is torch.strided and gradient._is_view() else gradient


def _edges(root: Node) -> tuple[list[torch.Tensor], list[GradientEdge], bool]:
    """The inputs, the edges into nodes that lead to inputs and to something else, and whether these may part there."""
    leads = _leads(root)
    entrances = [node for node in leads if is_entrance(node)]
    inner = [node for node in leads if leads[node] and not is_entrance(node)]
    parting = {node for node in inner if any(not leads[child] for child, _ in _children(node))}
    into = dict.fromkeys(edge for node in inner for edge in _children(node) if edge[0] in parting)
    splits = not any(map(_is_whole, parting)) and _ends_differ(parting, leads)
    return list(map(_leaf, entrances)), [GradientEdge(*edge) for edge in into], splits


def _is_whole(node: Node) -> bool:
    """Whether the node computes all its gradients whenever it runs, so that it would do its work twice."""
    return hasattr(node, "_forward_cls") or "Rnn" in node.name()


def _ends_differ(parting: Iterable[Node], leads: dict[Node, bool]) -> bool:
    """Whether each parameter is reached from one of these nodes only: else its gradients add up in another order."""
    ends = [end for node in parting for end in _ends(child for child, _ in _children(node) if not leads[child])]
    return len(set(ends)) == len(ends)


def _ends(nodes: Iterable[Node]) -> set[Node]:
    """The nodes without children below these."""
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
