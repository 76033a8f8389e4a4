"""A backward in two parts: the gradients of the inputs at once, those of the weights later.

On the way from the outputs to the inputs of a cell lie nodes that also feed parameters, such as the one of a linear
layer. The first part runs this way only, and keeps the gradient that arrives at each of these nodes. The second part
starts from there, and runs into the parameters only. Every operation is the one that an ordinary backward does, so the
values are the same.

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
    """Where the way to the parameters leaves the way to the inputs."""

    edges: list[GradientEdge]
    parameters: list[Tensor]


class Weights(NamedTuple):
    """What is left to do for the parameters at a branch."""

    branch: Branch
    gradients: Gradients
    hooked: bool
    """Whether the gradients have been through the hooks of the tensor that they belong to."""

    def backward(self, grown: AccumulatedGradients | None = None) -> None:
        """Accumulate their gradients in ``.grad``, or in ``grown``."""
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
    """Inside, a node works on the gradients in ``flowing``, whatever hooks of tensors make of what it gets."""
    handle = flowing[0][0].node.register_prehook(partial(_put, flowing))
    try:
        yield
    finally:
        handle.remove()


def _put(flowing: Sequence[tuple[GradientEdge, Tensor]], gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """``gradients`` of all outputs of a node, with those in ``flowing`` in their places."""
    own = {edge.output_nr: gradient for edge, gradient in flowing}
    return tuple([own.get(number, gradient) for number, gradient in enumerate(gradients)])


def backward_inputs(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[Gradients, list[Weights]] | None:
    """The gradients of ``leaves``, given those of ``outputs``, and what is left to do; None if it cannot be split."""
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
    """Around the first part: the gradients of several leaves are kept as autograd would accumulate them.

    Else that of a skip, which mostly is joined with another tensor, would keep all of their common gradient alive.
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
    """Around the first part; when the block has ended, copies of what arrived at ``edges``, taken when it did.

    A custom Function may overwrite the gradient that it gets, and in an ordinary backward the parameters have theirs
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
            handle.remove()  # the second part starts at the same nodes
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
    """Whether the node computes all its gradients whenever it runs, so that it should not run twice."""
    return hasattr(node, "_forward_cls") or "Rnn" in node.name()


class _Graph:
    """The nodes below ``roots``, and which of them lead to a leaf.

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
        """Whether there is a node that refuses to run for some inputs only: that of a reentrant checkpoint."""
        return any(type(node).__name__ == "CheckpointFunctionBackward" for node in self._leads)

    @property
    def is_custom(self) -> bool:
        """Whether there is a node written in Python, other than those by which tensors enter a stage."""
        return any(map(is_custom, {type(node) for node in self._leads}))

    def leads_to_leaf(self, node: Node) -> bool:
        return self._leads[node]

    def branches(self) -> Iterator[Branch]:
        """Every node on the way to a leaf from which a way to parameters leaves it."""
        arrivals = self._arrivals()
        for node, numbers in arrivals.items():
            aside = [child for child, _ in self._children[node] if not self._leads[child]]
            if aside:
                yield Branch([GradientEdge(node, number) for number in numbers], list(self._ends(aside)))

    def _arrivals(self) -> dict[Node, dict[int, None]]:
        """The nodes on the way to a leaf, with the numbers of their outputs at which gradients arrive."""
        arrivals: dict[Node, dict[int, None]] = {}
        for root in self.roots:
            arrivals.setdefault(root.node, {})[root.output_nr] = None
        for node, leads in self._leads.items():
            for child, number in self._children[node] if leads else ():
                if self._leads[child]:
                    arrivals.setdefault(child, {})[number] = None
        return arrivals

    def _explore(self, root: Node) -> None:
        """Visit nodes after all their children, without recursion: graphs are deep."""
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
        """The tensors in whose ``.grad`` the ways below ``nodes`` end."""
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
    """The tensor that a node without children accumulates the gradient of; None if it does not."""
    return getattr(node, "variable", None)
