"""Tensors of one value that share memory are sent as one tensor: that of which they are views.

::

    (x, x[:, :1], mask)  -- packed -->  Aliased(x, mask)  -- clone, copy, cut -->  unpacked --> (y, y[:, :1], mask)

So after any copy, a change of one tensor is a change of the others, and autograd knows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree

from microbatch import flatten, is_flat, unflatten

from ._leaves import is_custom
from ._memory import clusters, extent, has_own_storages, is_dense, region


class View(NamedTuple):
    """How a tensor is made of its source.

    Attributes:
        source: the number of the source.
        shape, stride, offset: where the elements lie in the source, which is dense; None if the tensor is the source.
        dtype: of the tensor, if it has another than the source.
        detached: whether the tensor needs no grad although the source does.
        conjugate, negative: lazy flags of the tensor.
    """

    source: int
    shape: torch.Size | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    detached: bool = False
    conjugate: bool = False
    negative: bool = False

    def of(self, source: Tensor) -> Tensor:
        """The tensor, as a view of ``source``."""
        if self.shape is None:
            return source
        base = source.detach() if self.detached else source
        if self.dtype is not None:
            base = base.as_strided((extent(base),), (1,)).view(self.dtype)
        view = base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)
        view = view.conj() if self.conjugate else view
        return view._neg_view() if self.negative else view


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
    """``value`` itself if no two of its tensors share memory, else an :class:`Aliased`.

    Tensors remain separate if autograd does not know that they share memory, or if the views cannot be made again
    elsewhere.
    """
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
    """A tensor of which all ``tensors`` are views; None if there is none."""
    if any(type(each) is not Tensor or each.layout is not torch.strided or each.is_quantized for each in tensors):
        return None
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    candidates = _roots(trained) if trained else [_batch(tensors), _flat(tensors)]
    fitting = (each for each in candidates if each is not None and all(_fits(tensor, each) for tensor in tensors))
    return next(fitting, None)


def _roots(trained: Sequence[Tensor]) -> Iterator[Tensor]:
    """What all ``trained`` are views of, as autograd knows it: something outside of the value, or one of them."""
    base = trained[0]._base
    for root in trained if base is None else (base, *trained):
        lazy = root.is_conj() or root.is_neg() or not root.requires_grad
        if not lazy and is_dense(root) and all(_is_view(tensor, root) for tensor in trained):
            yield root


def _is_view(tensor: Tensor, root: Tensor) -> bool:
    """Whether the gradient of ``tensor`` becomes one of ``root`` by strides alone."""
    if tensor is root:
        return True
    # A view of another dtype is not determined by strides; and a gradient sent directly to the root would skip hooks.
    if tensor.dtype is not root.dtype or tensor._backward_hooks:
        return False
    node, end = tensor.grad_fn, get_gradient_edge(root).node
    while node is not None and node is not end and not is_custom(type(node)):  # such a view has a gradient of its own
        node = node.next_functions[0][0] if node.next_functions else None
    return node is end


def _batch(tensors: Sequence[Tensor]) -> Tensor | None:
    """What all are views of, if it has their rows; micro-batches of that can be put together again."""
    root = tensors[0] if tensors[0]._base is None else tensors[0]._base
    rows = {tensor.shape[:1] for tensor in (root, *tensors)}
    return root if len(rows) == 1 and is_dense(root) and not root.is_conj() and not root.is_neg() else None


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """A tensor over all memory from the first to the last element of any."""
    regions = [region(tensor) for tensor in tensors]
    smallest, unit = min(tensors, key=lambda tensor: tensor.itemsize), max(tensor.itemsize for tensor in tensors)
    start = min(each.start for each in regions) // unit * unit
    stop = min(-(-max(each.stop for each in regions) // unit) * unit, smallest.untyped_storage().nbytes())
    plain = smallest.conj() if smallest.is_conj() else smallest
    plain = plain._neg_view() if plain.is_neg() else plain
    size = smallest.itemsize
    return plain.as_strided(((stop - start) // size,), (1,), start // size)


def _fits(tensor: Tensor, source: Tensor) -> bool:
    """Whether ``tensor`` is inside ``source``, at an offset that its dtype allows."""
    own, whole, size = region(tensor), region(source), tensor.itemsize
    aligned = tensor.dtype is source.dtype or (whole.start % size == whole.stop % size == 0)
    inside = whole.start <= own.start and own.stop <= whole.stop
    return aligned and inside and (own.start - whole.start) % size == 0


def _view(tensor: Tensor, source: Tensor, number: int) -> View:
    if tensor is source:
        return View(number)
    return View(
        number,
        tensor.shape,
        tensor.stride(),
        (region(tensor).start - region(source).start) // tensor.itemsize,
        None if tensor.dtype is source.dtype else tensor.dtype,
        source.requires_grad and not tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )
