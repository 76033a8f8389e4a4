"""A backward in two parts: the gradients of the inputs first, those of the weights later.

Between the outputs and the inputs of a cell there are nodes that also lead to parameters, such as that of a linear
layer. The first part computes the paths to the inputs only, and keeps the gradients that arrive at these nodes. The
second part starts from there, and computes the paths to the parameters. Each operation is that of an ordinary backward,
so the values are the same.

Source: zero bubble (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ..values._leaves import is_custom, like_accumulated, own_memory
from . import _autograd_calls as _engine
from ._accumulate import AccumulatedGradients

Gradients = list[Tensor | None]


class Branch(NamedTuple):
    """A node at which paths to the parameters leave the paths to the inputs."""

    edges: list[GradientEdge]
    parameters: list[Tensor]


class Weights(NamedTuple):
    """The rest of the backward at such a node: the gradients of parameters."""

    branch: Branch
    gradients: Gradients
    hooked: bool
    """Whether the gradients have passed the hooks of the tensor that they belong to."""

    def backward(self, grown: AccumulatedGradients | None = None) -> None:
        """Accumulate the gradients of the parameters in ``.grad``, or in ``grown``."""
        pairs = zip(self.branch.edges, self.gradients, strict=True)
        flowing = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if not flowing:
            return
        edges, gradients = zip(*flowing, strict=True)
        with _replaced(flowing) if self.hooked else nullcontext():
            accumulate = _engine.accumulate_in if grown is None else grown.accumulate
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
    graph = _Graph([get_gradient_edge(output) for output in outputs], {id(leaf) for leaf in leaves})
    branches = _branches(graph)
    if branches is None:
        return None
    edges = [edge for branch in branches for edge in branch.edges]
    custom = graph.is_custom
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


def _branches(graph: _Graph) -> list[Branch] | None:
    if not all(graph.leads_to_leaf(root.node) for root in graph.roots) or graph.is_checkpointed:
        return None
    branches = list(graph.branches())
    parameters = [id(parameter) for branch in branches for parameter in branch.parameters]
    if len(set(parameters)) < len(parameters) or any(_is_whole(edge.node) for b in branches for edge in b.edges):
        return None
    return branches


def _is_whole(node: Node) -> bool:
    """Whether ``node`` always computes all its gradients, so that it should not run twice."""
    return hasattr(node, "_forward_cls") or "Rnn" in node.name()


class _Graph:
    """The graph below ``roots``: its nodes, and which of them lead to a leaf.

    It is explored for every micro-batch. The children of each node are read once, since that takes longest.

    This is walked for every micro-batch. Asking a node for its children costs most, and is done once.
    """

    def __init__(self, roots: Sequence[GradientEdge], leaves: set[int]) -> None:
        self.roots = roots
        self._leaves = leaves
        self._children: dict[Node, list[tuple[Node, int]]] = {}
        self._leads: dict[Node, bool] = {}
        for root in roots:
            self._explore(root.node)

    @property
    def is_checkpointed(self) -> bool:
        """Whether there is a node that cannot run for some inputs only: that of a reentrant checkpoint."""
        return any(type(node).__name__ == "CheckpointFunctionBackward" for node in self._leads)

    @property
    def is_custom(self) -> bool:
        """Whether there is a node written in Python, other than those through which tensors enter a stage."""
        return any(map(is_custom, {type(node) for node in self._leads}))

    def leads_to_leaf(self, node: Node) -> bool:
        return self._leads[node]

    def branches(self) -> Iterator[Branch]:
        """Every node on a path to a leaf that also has a path to parameters."""
        arrivals = self._arrivals()
        for node, numbers in arrivals.items():
            aside = [child for child, _ in self._children[node] if not self._leads[child]]
            if aside:
                yield Branch([GradientEdge(node, number) for number in numbers], list(self._ends(aside)))

    def _arrivals(self) -> dict[Node, dict[int, None]]:
        """The nodes on paths to leaves, with the numbers of their outputs at which gradients arrive."""
        arrivals: dict[Node, dict[int, None]] = {}
        for root in self.roots:
            arrivals.setdefault(root.node, {})[root.output_nr] = None
        for node, leads in self._leads.items():
            for child, number in self._children[node] if leads else ():
                if self._leads[child]:
                    arrivals.setdefault(child, {})[number] = None
        return arrivals

    def _explore(self, root: Node) -> None:
        """Visit ``root`` after all its children, without recursion, since graphs are deep."""
        stack = [root]
        while stack:
            node = stack[-1]
            children = self._children.get(node)
            if children is None:
                children = [(child, number) for child, number in node.next_functions if child is not None]
                self._children[node] = children
                stack += [child for child, _ in children if child not in self._children]
            else:
                stack.pop()
                self._leads[node] = any(self._leads[child] for child, _ in children) or self._is_leaf(node)

    def _is_leaf(self, node: Node) -> bool:
        return not self._children[node] and id(_variable(node)) in self._leaves

    def _ends(self, nodes: Iterable[Node]) -> Iterator[Tensor]:
        """The tensors to whose ``.grad`` the paths below ``nodes`` lead."""
        stack = list(nodes)
        seen = set(stack)
        while stack:
            node = stack.pop()
            children = [child for child, _ in self._children[node] if child not in seen]
            seen.update(children)
            stack.extend(children)
            if not self._children[node] and (variable := _variable(node)) is not None:
                yield variable


def _variable(node: Node) -> Any:
    """The tensor whose gradient ``node`` accumulates; None if it accumulates none."""
    return getattr(node, "variable", None)
