"""Find where a backward can be split: input gradients first, parameter gradients later.

Some nodes on the paths from outputs to inputs also lead to parameters, for example the node of a linear layer. The
first part runs only the paths to the inputs, and saves the gradients that arrive at these nodes. The second part starts
from these gradients.

Source: zero bubble (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

__all__ = ["BackwardGraph", "Branch"]


class Branch(NamedTuple):
    """A node where paths to parameters leave the paths to inputs.

    Attributes:
        edges: the edges through which gradients arrive at the node.
        parameters: the tensors whose ``.grad`` the paths to parameters accumulate into.
    """

    edges: list[GradientEdge]
    parameters: list[Tensor]


class BackwardGraph:
    """The nodes of a backward.

    Args:
        roots: the edges where the backward starts.

    Attributes:
        nodes: all nodes, each after its ``next_functions``.
    """

    def __init__(self, roots: Sequence[GradientEdge]) -> None:
        self.nodes: list[Node] = []
        self._roots = roots
        self._children: dict[Node, list[tuple[Node, int]]] = {}
        stack = [root.node for root in roots]
        while stack:  # iterative, because graphs may exceed the recursion limit
            node = stack[-1]
            if node not in self._children:
                children = [(child, number) for child, number in node.next_functions if child is not None]
                self._children[node] = children
                stack += [child for child, _ in children if child not in self._children]
            else:
                self.nodes.append(stack.pop())

    def branches(self, leaves: Container[int]) -> list[Branch] | None:
        """Find every node that is on a path to an input and also has a path to parameters.

        Args:
            leaves: the ids of the inputs.

        Returns:
            The branches; None if the backward cannot be split, because a root leads to no input, a branch always
            computes all its gradients, the graph has a reentrant checkpoint, or the gradients of a parameter would be
            added in a different order.
        """
        leads: dict[Node, bool] = {}
        for node in self.nodes:
            children = self._children[node]
            leads[node] = any(leads[child] for child, _ in children) if children else id(_variable(node)) in leaves
        if not all(leads[root.node] for root in self._roots) or any(map(_is_reentrant, self.nodes)):
            return None
        found = list(self._find_branches(leads))
        parameters = [id(parameter) for branch in found for parameter in branch.parameters]
        whole = any(_is_whole(edge.node) for branch in found for edge in branch.edges)
        return None if whole or len(set(parameters)) < len(parameters) else found

    def _find_branches(self, leads: dict[Node, bool]) -> Iterator[Branch]:
        arrivals: dict[Node, dict[int, None]] = {}
        for root in self._roots:
            arrivals.setdefault(root.node, {})[root.output_nr] = None
        for node in self.nodes:
            for child, number in self._children[node] if leads[node] else ():
                if leads[child]:
                    arrivals.setdefault(child, {})[number] = None
        for node, numbers in arrivals.items():
            aside = [child for child, _ in self._children[node] if not leads[child]]
            if aside:
                yield Branch([GradientEdge(node, number) for number in numbers], list(self._ends(aside)))

    def _ends(self, nodes: Iterable[Node]) -> Iterator[Tensor]:
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
    return getattr(node, "variable", None)


def _is_whole(node: Node) -> bool:
    """Return whether ``node`` always computes all its gradients, so that it should not run twice."""
    return hasattr(node, "_forward_cls") or "Rnn" in node.name() or _is_group_norm_of_the_cpu(node)


def _is_group_norm_of_the_cpu(node: Node) -> bool:
    # Its channels_last kernel writes the input gradient even if it is not requested and has no memory, which crashes
    # the process (PyTorch 2.13).
    return node.name().startswith("NativeGroupNorm") and node._input_metadata[0].device.type == "cpu"


def _is_reentrant(node: Node) -> bool:
    """Return whether ``node`` is a reentrant checkpoint, which cannot run for a subset of its inputs."""
    return type(node).__name__ == "CheckpointFunctionBackward"
