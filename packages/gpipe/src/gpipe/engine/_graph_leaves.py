"""The leaves of a graph: the tensors to whose ``.grad`` its backward adds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..values._leaves import is_custom


class Below(NamedTuple):
    """What is below some tensors in their graph."""

    leaves: list[Tensor]
    is_custom: bool
    """Whether there are nodes written in Python, other than those through which tensors enter a stage."""
    hides: bool
    """Whether there may be other leaves, inside a reentrant checkpoint or a pipe, which have backwards of their own."""


def below(tensors: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> Below:
    """The leaves below ``tensors``, without ``inputs``, in an order that depends only on the graph.

    Where it is needed it runs for every micro-batch, and takes a third of a microsecond a node.
    """
    roots = [tensor.grad_fn or get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad]
    nodes = dict.fromkeys(roots)
    stack, ends = list(nodes), []
    while stack:
        node = stack.pop()
        children = node.next_functions
        if not children:
            ends.append(node)
        for child, _ in children:
            if child is not None and child not in nodes:
                nodes[child] = None
                stack.append(child)
    known = {id(tensor) for tensor in inputs}
    leaves = [leaf for node in ends if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in known]
    kinds = {type(node) for node in nodes}
    return Below(leaves, any(map(is_custom, kinds)), any(kind.__name__ in _HIDING for kind in kinds))


_HIDING = ("CheckpointFunctionBackward", "PipelineBackwardBackward")
