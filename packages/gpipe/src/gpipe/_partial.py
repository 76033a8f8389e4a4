"""A backward in two parts: the gradients of the inputs at once, those of the weights later.

On the way from the outputs to the inputs of a cell lie nodes that also feed parameters, such as the one of a linear
layer. The first part runs this way only, and keeps the gradient that arrives at each of these nodes. The second part
starts from there, and runs into the parameters only. Every operation is the one that an ordinary backward does, so the
values are the same.

Source: zero bubble (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = list[Tensor | None]


class Branch(NamedTuple):
    """Where the way to the parameters leaves the way to the inputs."""

    edges: list[GradientEdge]
    parameters: list[Tensor]


class Weights(NamedTuple):
    """What is left to do for the parameters at a branch."""

    branch: Branch
    gradients: list[Tensor | None]

    def backward(self) -> None:
        """Accumulate their gradients."""
        pairs = zip(self.branch.edges, self.gradients, strict=True)
        flowing = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if flowing:
            edges, gradients = zip(*flowing, strict=True)
            torch.autograd.backward(edges, gradients, inputs=self.branch.parameters)


def backward_inputs(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[Gradients, list[Weights]] | None:
    """The gradients of ``leaves``, given those of ``outputs``, and what is left to do; None if it cannot be split."""
    branches = _branches(outputs, leaves)
    if branches is None:
        return None
    ends: list[Any] = [*leaves, *(edge for branch in branches for edge in branch.edges)]
    found = torch.autograd.grad(outputs, ends, seeds, retain_graph=True, allow_unused=True)
    arrived = iter(found[len(leaves) :])
    return list(found[: len(leaves)]), [Weights(branch, [next(arrived) for _ in branch.edges]) for branch in branches]


def _branches(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Branch] | None:
    roots = [get_gradient_edge(output) for output in outputs]
    graph = _Graph(roots, {id(leaf) for leaf in leaves})
    if not all(graph.leads_to_leaf(root.node) for root in roots):
        return None
    branches = list(graph.branches())
    parameters = [id(parameter) for branch in branches for parameter in branch.parameters]
    if len(set(parameters)) < len(parameters) or any(_is_whole(edge.node) for b in branches for edge in b.edges):
        return None
    if any(node.name() == "CheckpointFunctionBackward" for node in graph.nodes):  # refuses to run for some inputs only
        return None
    return branches


def _is_whole(node: Node) -> bool:
    """Whether the node computes all its gradients whenever it runs, so that it should not run twice."""
    return hasattr(node, "_forward_cls") or "Rnn" in node.name()


class _Graph:
    """The nodes below ``roots``, and which of them lead to a leaf."""

    def __init__(self, roots: Sequence[GradientEdge], leaves: set[int]) -> None:
        self._leaves = leaves
        self._leads: dict[Node, bool] = {}
        self._arrivals: dict[Node, dict[int, None]] = {}
        for root in roots:
            self._note(root.node, root.output_nr)
            self._explore(root.node)

    @property
    def nodes(self) -> Iterable[Node]:
        """All of them."""
        return self._leads

    def leads_to_leaf(self, node: Node) -> bool:
        return self._leads[node]

    def branches(self) -> Iterator[Branch]:
        """Every node on the way to a leaf from which a way to parameters leaves it."""
        for node, leads in self._leads.items():
            aside = [child for child, _ in node.next_functions if child is not None and not self._leads[child]]
            if leads and aside:
                parameters = {id(p): p for child in aside for p in _variables(child)}
                edges = [GradientEdge(node, number) for number in self._arrivals[node]]
                yield Branch(edges, list(parameters.values()))

    def _note(self, node: Node, number: int) -> None:
        self._arrivals.setdefault(node, {})[number] = None

    def _explore(self, root: Node) -> None:
        """Visit nodes after all their children, without recursion: graphs are deep."""
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, done = stack.pop()
            if node in self._leads:
                continue
            children = [(child, number) for child, number in node.next_functions if child is not None]
            if done:
                variable = getattr(node, "variable", None)
                is_leaf = variable is not None and id(variable) in self._leaves
                self._leads[node] = is_leaf or any(self._leads[child] for child, _ in children)
                continue
            stack.append((node, True))
            for child, number in children:
                self._note(child, number)
                stack.append((child, False))


def _variables(node: Node) -> Iterator[Any]:
    """The tensors in whose ``.grad`` the ways below ``node`` end."""
    seen = {node}
    stack = [node]
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        children = [child for child, _ in node.next_functions if child is not None and child not in seen]
        seen.update(children)
        stack.extend(children)
