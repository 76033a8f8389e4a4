"""Where a backward can be cut in two: the gradients of inputs first, those of parameters later.

Some nodes on the paths from outputs to inputs also lead to parameters, such as that of a linear layer. A first part
computes the paths to the inputs only, and keeps the gradients that arrive at these nodes; a second part starts there.

Source: zero bubble (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

__all__ = ["BackwardGraph", "Branch"]


class Branch(NamedTuple):
    """A node at which paths to parameters leave the paths to inputs.

    Attributes:
        edges: where gradients arrive at the node.
        parameters: the tensors to whose ``.grad`` the other paths lead.
    """

    edges: list[GradientEdge]
    parameters: list[Tensor]


class BackwardGraph:
    """The nodes of a backward.

    Args:
        roots: the edges at which the backward begins.

    Attributes:
        nodes: all nodes, each after those that it leads to.
    """

    def __init__(self, roots: Sequence[GradientEdge]) -> None:
        self.nodes: list[Node] = []
        self._roots = roots
        self._children: dict[Node, list[tuple[Node, int]]] = {}
        stack = [root.node for root in roots]
        while stack:  # without recursion, since graphs are deep
            node = stack[-1]
            if node not in self._children:
                children = [(child, number) for child, number in node.next_functions if child is not None]
                self._children[node] = children
                stack += [child for child, _ in children if child not in self._children]
            else:
                self.nodes.append(stack.pop())

    def branches(self, leaves: Container[int]) -> list[Branch] | None:
        """Every node on a path to a leaf that also has a path to parameters.

        Args:
            leaves: the ids of the inputs.

        Returns:
            The branches; None if the backward cannot be cut there: a root leads to no input, one operation computes all
            its gradients at once, or the gradients of a parameter would be added in another order.
        """
        leads: dict[Node, bool] = {}
        for node in self.nodes:
            children = self._children[node]
            leads[node] = any(leads[child] for child, _ in children) if children else id(_variable(node)) in leaves
        if not all(leads[root.node] for root in self._roots) or any(map(_is_reentrant, self.nodes)):
            return None
        found = list(self._found(leads))
        parameters = [id(parameter) for branch in found for parameter in branch.parameters]
        whole = any(_is_whole(edge.node) for branch in found for edge in branch.edges)
        return None if whole or len(set(parameters)) < len(parameters) else found

    def _found(self, leads: dict[Node, bool]) -> Iterator[Branch]:
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
    """Whether ``node`` always computes all its gradients, so that it should not run twice."""
    return hasattr(node, "_forward_cls") or "Rnn" in node.name() or _is_group_norm_of_the_cpu(node)


def _is_group_norm_of_the_cpu(node: Node) -> bool:
    # Its kernel for channels_last writes the gradient of the input also if nobody asks for it, and no memory is there:
    # the process ends (seen in PyTorch 2.13).
    return node.name().startswith("NativeGroupNorm") and node._input_metadata[0].device.type == "cpu"


def _is_reentrant(node: Node) -> bool:
    """Whether ``node`` is a reentrant checkpoint, which cannot run for some inputs only."""
    return type(node).__name__ == "CheckpointFunctionBackward"
