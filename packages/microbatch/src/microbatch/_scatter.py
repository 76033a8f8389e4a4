"""Mini-batch to micro-batches."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ._batch import Batch
from ._check import is_tensors
from ._spec import Split, rules
from ._tree import Place
from ._versions import Versions, counter

Cut = Callable[[Tensor, int, int], Sequence[Tensor]]


def scatter(value: Any, chunks: int, spec: Any = None) -> list[Batch]:
    """At most `chunks` micro-batches, which `gather` puts together again.

    Rows are dealt as `torch.chunk` deals them: 7 rows in 4 chunks are 2, 2, 2, 1, and 2 rows are 2 micro-batches; no
    rows are `chunks` micro-batches of none. Tensors of one value may differ in rows if they give the same number of
    micro-batches. Gradients flow back to `value`.

    The micro-batches live in a copy of their own, so an in-place layer on one changes neither the others nor `value`. A
    single micro-batch is `value` itself, not copied. If `value` requires grad and is changed in place afterwards, its
    backward fails. `scatter_views` is the same without the copy.

    `spec` says how leaves are split: `Split(dim)`, `Replicate()`, or a tree of them that is a prefix of `value`.

    Raises:
        TypeError: a leaf that is neither tensor nor None and is not replicated; a sparse, nested or packed one.
        ValueError: chunks < 1; nothing to split; a tensor without dimensions; different numbers of micro-batches; a
            spec that does not fit. Each names the path, as in `input['mask'][1]`.

    >>> [batch.tensor.tolist() for batch in scatter(torch.arange(7), 4)]
    [[0, 1], [2, 3], [4, 5], [6]]
    """
    return _scatter(value, chunks, spec, _copy)


def scatter_views(value: Any, chunks: int, spec: Any = None) -> tuple[list[Batch], Versions]:
    """`scatter` without the copy and outside of autograd, with the means to notice changes.

    The micro-batches share the memory of `value`, detached, and each has a version counter of its own. An in-place
    layer on one changes `value` too, as without micro-batches. Autograd hears of it, and of changes that the caller
    makes to `value`, by `Versions.sync`: call it before the backward.

    >>> x = torch.zeros(4)
    >>> (a, b), versions = scatter_views(x, 2)
    >>> _ = a.tensor.add_(1); versions.sync()
    >>> x, a.tensor._version, b.tensor._version, x._version
    (tensor([1., 1., 0., 0.]), 1, 0, 1)
    """
    versions = Versions()

    def view(tensor: Tensor, chunks: int, dim: int) -> Sequence[Tensor]:
        if _is_one(tensor, chunks, dim):
            return (tensor.detach(),)  # no siblings: it counts with its source
        views = _own_versions(tensor.detach(), chunks, dim)
        versions.add(tensor, views)
        return views

    return _scatter(value, chunks, spec, view), versions


def _scatter(value: Any, chunks: int, spec: Any, cut: Cut) -> list[Batch]:
    chunks = _count(chunks)
    if spec is None and isinstance(value, Tensor):
        return [Batch(chunk) for chunk in _column(value, chunks, 0, cut, Place(value, 0, "input"))]
    if spec is None and value and is_tensors(value):
        columns = [_column(tensor, chunks, 0, cut, Place(value, i, "input")) for i, tensor in enumerate(value)]
        _expect_same_count(columns, value, chunks)
        return [Batch(row) for row in zip(*columns, strict=True)]
    return _scatter_tree(value, chunks, spec, cut)


def _scatter_tree(value: Any, chunks: int, spec: Any, cut: Cut) -> list[Batch]:
    leaves, tree = pytree.tree_flatten(value)
    columns: list[Sequence[Any] | None] = [
        _column(leaf, chunks, rule.dim, cut, Place(value, i, "input")) if isinstance(rule, Split) else None
        for i, (leaf, rule) in enumerate(zip(leaves, rules(value, spec, "input"), strict=True))
    ]
    count = _expect_same_count(columns, value, chunks)
    whole = [[leaf] * count if column is None else column for leaf, column in zip(leaves, columns, strict=True)]
    return [Batch(pytree.tree_unflatten(row, tree)) for row in zip(*whole, strict=True)]


def _column(tensor: Tensor, chunks: int, dim: int, cut: Cut, place: Place) -> Sequence[Tensor]:
    """One leaf of every micro-batch."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise TypeError(f"{place} is {kind}, which cannot be cut; make it dense, or Replicate() it by spec=")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{place} has shape {tuple(tensor.shape)} and no dimension {dim} to split; give it one, "
            "or Replicate() it by spec="
        )
    try:
        return cut(tensor, chunks, dim)
    except (TypeError, NotImplementedError) as error:  # a subclass of Tensor need not know every operator
        raise TypeError(f"{place} is of type {type(tensor).__name__}, which torch cannot cut: {error}") from error


def _copy(tensor: Tensor, chunks: int, dim: int) -> Sequence[Tensor]:
    if _is_one(tensor, chunks, dim):
        return (tensor,)
    if tensor.requires_grad:
        return cast(Sequence[Tensor], _Copy.apply(tensor, chunks, dim))  # type: ignore[no-untyped-call]
    return _own_versions(tensor.clone(), chunks, dim)


class _Copy(torch.autograd.Function):
    """Differentiable, and notices in backward that its source was changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, chunks: int, dim: int) -> tuple[Tensor, ...]:
        # Not save_for_backward: that would show the whole source to saved-tensor hooks, which may copy it elsewhere.
        ctx.counter, ctx.version, ctx.dim = counter(tensor), tensor._version, dim
        return tuple(_own_versions(tensor.clone(), chunks, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.counter._version != ctx.version:
            raise RuntimeError(
                f"the source of scatter has been changed in place: it is at version {ctx.counter._version}, expected "
                f"{ctx.version}; change it after the backward, or scatter a clone of it"
            )
        return torch.cat(grads, ctx.dim), None, None


def _is_one(tensor: Tensor, chunks: int, dim: int) -> bool:
    return chunks == 1 or tensor.size(dim) == 1


def _own_versions(tensor: Tensor, chunks: int, dim: int) -> Sequence[Tensor]:
    """`tensor.chunk` with a version counter for each chunk: what is unsafe is that autograd knows of no relation."""
    return tensor.unsafe_chunk(chunks, dim)


def _count(chunks: Any) -> int:
    try:
        count = operator.index(chunks)
    except TypeError:
        raise TypeError(f"chunks is {chunks!r}; expected an integer of at least 1") from None
    if count < 1:
        raise ValueError(f"chunks is {chunks!r}; expected at least 1")
    return count


def _expect_same_count(columns: Sequence[Sequence[Any] | None], value: Any, chunks: int) -> int:
    counts = {i: len(column) for i, column in enumerate(columns) if column is not None}
    if not counts:
        raise ValueError("input has no tensor to split; a mini-batch needs at least one, whose rows are its samples")
    first = next(iter(counts))
    for i, count in counts.items():
        if count != counts[first]:
            raise ValueError(
                f"chunks={chunks} makes {_story(value, first, counts[first])} but {_story(value, i, count)}; "
                "all tensors of a mini-batch must give equally many"
            )
    return counts[first]


def _story(value: Any, index: int, count: int) -> str:
    shape = tuple(pytree.tree_leaves(value)[index].shape)
    return f"{count} micro-batches of {Place(value, index, 'input')} with shape {shape}"
