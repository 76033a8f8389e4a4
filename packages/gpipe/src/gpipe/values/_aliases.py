"""Tensors of one value that share memory are sent as one tensor: that of which they are views.

::

    (x, x[:, :1], mask)  -- packed -->  Aliased(x, mask)  -- clone, copy, cut -->  unpacked --> (y, y[:, :1], mask)

So after any copy, a change of one tensor is a change of the others, and autograd knows it. What cannot be sent so stays
as it is, and :mod:`gpipe.values._sharing` refuses in-place work on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree

from microbatch import flatten, is_flat, unflatten

from ._leaves import is_custom
from ._memory import clusters, has_own_storages, is_dense, region


class View(NamedTuple):
    """How a tensor is made of its source.

    Attributes:
        source: the number of the source.
        shape, stride, offset: where the elements lie in the source, which is dense; None if the tensor is the source.
        detached: whether the tensor needs no grad although the source does.
    """

    source: int
    shape: torch.Size | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    detached: bool = False

    def of(self, source: Tensor) -> Tensor:
        """The tensor, as a view of ``source``."""
        if self.shape is None:
            return source
        base = source.detach() if self.detached else source
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)


class Plan(NamedTuple):
    """How a value is made of its sources: the views, and for each leaf the number of a view, or a constant."""

    views: list[View]
    leaves: list[tuple[int | None, Any]]
    tree: _pytree.TreeSpec


class Aliased:
    """A value some of whose tensors share memory. As a pytree its leaves are the sources, which share no memory."""

    __slots__ = ("plan", "sources")

    def __init__(self, sources: Iterable[Tensor], plan: Plan) -> None:
        self.sources = list(sources)
        self.plan = plan

    def value(self) -> Any:
        """The value, made of the present sources."""
        tensors = [view.of(self.sources[view.source]) for view in self.plan.views]
        leaves = [constant if k is None else tensors[k] for k, constant in self.plan.leaves]
        return unflatten(leaves, self.plan.tree)

    def spread(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the tensors in :meth:`value`, given those of the sources: the first tensor of each source
        gets it.
        """
        left = dict(enumerate(gradients))
        views = [self.plan.views[k] for k, _ in self.plan.leaves if k is not None]
        return [left.pop(view.source, None) if view.shape is None else None for view in views]

    @property
    def used(self) -> list[int]:
        """For each tensor in :meth:`value`, the number of its source."""
        return [self.plan.views[k].source for k, _ in self.plan.leaves if k is not None]


_pytree.register_pytree_node(
    Aliased, lambda aliased: (aliased.sources, aliased.plan), lambda sources, plan: Aliased(sources, plan)
)


def packed(value: Any) -> Any:
    """``value`` itself if no two of its tensors share memory, or can be sent as one; else an :class:`Aliased`."""
    if isinstance(value, Tensor):
        return value
    leaves = value if is_flat(value) else flatten(value)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return value if has_own_storages(tensors) else _packed(value, {id(tensor): tensor for tensor in tensors})


def unpacked(value: Any) -> Any:
    """The value that :func:`packed` has packed."""
    return value.value() if type(value) is Aliased else value


def _packed(value: Any, tensors: dict[int, Tensor]) -> Any:
    sources: list[Tensor] = []
    views: dict[int, View] = {}
    for cluster in clusters(list(tensors.values())):
        source = cluster[0] if len(cluster) == 1 else _source(cluster)
        for tensor in cluster:
            views[id(tensor)] = View(len(sources)) if source is None else _view(tensor, source, len(sources))
            sources += [tensor] if source is None else []
        sources += [] if source is None else [source]
    leaves, tree = flatten(value)
    if len(sources) == sum(isinstance(leaf, Tensor) for leaf in leaves):
        return value  # no tensors could be combined
    number = {key: k for k, key in enumerate(views)}
    plan = Plan(
        list(views.values()),
        [(number[id(leaf)], None) if isinstance(leaf, Tensor) else (None, leaf) for leaf in leaves],
        tree,
    )
    return Aliased(sources, plan)


def _source(tensors: Sequence[Tensor]) -> Tensor | None:
    """A tensor of which all ``tensors`` are views: one of them, or what autograd knows as their base; None if none."""
    if not all(type(tensor) is Tensor and _is_plain(tensor) for tensor in tensors):
        return None
    own = [tensor for tensor in tensors if tensor.requires_grad] or tensors
    base = own[0]._base
    # Of other rows, the base may be the whole mini-batch of which these are a part.
    has_rows = base is not None and all(tensor.shape[:1] == base.shape[:1] for tensor in tensors)
    candidates = [base, *own] if base is not None and has_rows else own
    return next((each for each in candidates if _is_source(each, tensors, own)), None)


def _is_source(source: Tensor, tensors: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
    """Whether all ``tensors`` are views of ``source``; in the eyes of autograd too, for those that require grad."""
    whole = region(source)
    return (
        _is_plain(source)
        and is_dense(source)
        and source.requires_grad == own[0].requires_grad
        and all(tensor.dtype is source.dtype for tensor in tensors)
        and all(whole.start <= where.start and where.stop <= whole.stop for where in map(region, tensors))
        and (not source.requires_grad or all(_is_view(tensor, source) for tensor in own))
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory, shape and strides are all that there is to the tensor."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not tensor.is_quantized and not lazy


def _is_view(tensor: Tensor, source: Tensor) -> bool:
    """Whether the gradient of ``tensor`` becomes one of ``source`` by strides alone."""
    if tensor is source:
        return True
    if tensor._backward_hooks:  # a gradient that is sent to the source directly would skip them
        return False
    node, end = tensor.grad_fn, get_gradient_edge(source).node
    while node is not None and node is not end and not is_custom(type(node)):  # such a view has a gradient of its own
        node = node.next_functions[0][0] if node.next_functions else None
    return node is end


def _view(tensor: Tensor, source: Tensor, number: int) -> View:
    if tensor is source:
        return View(number)
    offset = (region(tensor).start - region(source).start) // tensor.itemsize
    return View(number, tensor.shape, tensor.stride(), offset, source.requires_grad and not tensor.requires_grad)
