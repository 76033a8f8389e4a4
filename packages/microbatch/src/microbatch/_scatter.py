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
from ._tree import leaf_path
from ._versions import Versions

Cut = Callable[[Tensor, int, int], Sequence[Tensor]]


def scatter(value: Any, chunks: int, spec: Any = None) -> list[Batch]:
    """At most `chunks` micro-batches, which `gather` puts together again.

    Rows are dealt as `torch.chunk` deals them: 7 rows in 4 chunks are 2, 2, 2, 1, and 2 rows are 2 micro-batches.
    Tensors of one value may differ in rows if they give the same number of micro-batches. Gradients flow back to `value`.

    The micro-batches are independent: they live in a copy of their own, so an in-place layer on one changes neither the
    others nor `value`. A single micro-batch is `value` itself, not copied. A source that requires grad and is changed in
    place before its backward makes that backward fail. `scatter_views` is the same without the copy.

    `spec` says how leaves are split: `Split(dim)`, `Replicate()`, or a tree of them that is a prefix of `value`.

    Raises:
        TypeError: a leaf that is neither tensor nor None, and not replicated; sparse and nested tensors.
        ValueError: chunks < 1; nothing to split; a tensor without dimensions; different numbers of micro-batches; a spec
            that does not fit. Each names the path, as in `input['mask'][1]`.

    >>> [batch.tensor.tolist() for batch in scatter(torch.arange(7), 4)]
    [[0, 1], [2, 3], [4, 5], [6]]
    """
    return _scatter(value, chunks, spec, _copy)


def scatter_views(value: Any, chunks: int, spec: Any = None) -> tuple[list[Batch], Versions]:
    """`scatter` without copying, outside of autograd, with the means to notice changes.

    The micro-batches share the memory of `value`, detached, and each has a version counter of its own. An in-place layer
    on one changes `value` too, as without micro-batches; autograd hears of it, and of changes that the caller makes to
    `value`, by `Versions.sync`: call it before the backward.

    >>> x = torch.zeros(4)
    >>> (a, b), versions = scatter_views(x, 2)
    >>> _ = a.tensor.add_(1); versions.sync()
    >>> x, a.tensor._version, b.tensor._version, x._version
    (tensor([1., 1., 0., 0.]), 1, 0, 1)
    """
    versions = Versions()

    def view(tensor: Tensor, chunks: int, dim: int) -> Sequence[Tensor]:
        if _is_one(tensor, chunks, dim):
            return (tensor.detach(),)  # no siblings, hence one counter for both
        views = _own_versions(tensor.detach(), chunks, dim)
        versions.add(tensor, views)
        return views

    return _scatter(value, chunks, spec, view), versions


def _scatter(value: Any, chunks: int, spec: Any, cut: Cut) -> list[Batch]:
    chunks = _count(chunks)
    if spec is None and isinstance(value, Tensor):
        _expect_rows(value, 0, value, 0)
        return [Batch(chunk) for chunk in cut(value, chunks, 0)]
    if spec is None and value and is_tensors(value):
        for i, tensor in enumerate(value):
            _expect_rows(tensor, 0, value, i)
        columns = [cut(tensor, chunks, 0) for tensor in value]
        _expect_same_count(columns, value, chunks)
        return [Batch(row) for row in zip(*columns, strict=True)]
    return _scatter_tree(value, chunks, spec, cut)


def _scatter_tree(value: Any, chunks: int, spec: Any, cut: Cut) -> list[Batch]:
    leaves, tree = pytree.tree_flatten(value)
    columns: list[Sequence[Any] | None] = []
    for i, (leaf, rule) in enumerate(zip(leaves, rules(value, spec, "input"), strict=True)):
        if isinstance(rule, Split):
            _expect_rows(leaf, rule.dim, value, i)
            columns.append(cut(leaf, chunks, rule.dim))
        else:
            columns.append(None)
    count = _expect_same_count(columns, value, chunks)
    whole = [[leaf] * count if column is None else column for leaf, column in zip(leaves, columns, strict=True)]
    return [Batch(pytree.tree_unflatten(row, tree)) for row in zip(*whole, strict=True)]


def _copy(tensor: Tensor, chunks: int, dim: int) -> Sequence[Tensor]:
    if _is_one(tensor, chunks, dim):
        return (tensor,)
    if tensor.requires_grad and torch.is_grad_enabled():
        return cast(Sequence[Tensor], _Copy.apply(tensor, chunks, dim))  # type: ignore[no-untyped-call]
    return _own_versions(tensor.clone(), chunks, dim)


def _is_one(tensor: Tensor, chunks: int, dim: int) -> bool:
    return chunks == 1 or tensor.size(dim) == 1


def _own_versions(tensor: Tensor, chunks: int, dim: int) -> Sequence[Tensor]:
    """`tensor.chunk`, but with a version counter for each chunk: that is all that is "unsafe" about the operator."""
    return tensor.unsafe_chunk(chunks, dim)


class _Copy(torch.autograd.Function):
    """Differentiable, and in its backward notices a source that was changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, chunks: int, dim: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(tensor)
        ctx.dim = dim
        return tuple(_own_versions(tensor.clone(), chunks, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _ = ctx.saved_tensors  # raises if the version has changed
        return torch.cat(grads, ctx.dim), None, None


def _count(chunks: Any) -> int:
    try:
        count = operator.index(chunks)
    except TypeError:
        raise TypeError(f"chunks is {chunks!r}; expected an integer of at least 1") from None
    if count < 1:
        raise ValueError(f"chunks is {chunks!r}; expected at least 1")
    return count


def _expect_rows(tensor: Tensor, dim: int, value: Any, index: int) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise TypeError(
            f"{leaf_path(value, index, 'input')} is {kind} and cannot be cut into rows; make it dense, "
            "or Replicate() it by spec="
        )
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{leaf_path(value, index, 'input')} has shape {tuple(tensor.shape)} and no dimension {dim} to split; "
            "give it one, or Replicate() it by spec="
        )


def _expect_same_count(columns: Sequence[Sequence[Any] | None], value: Any, chunks: int) -> int:
    counts = {i: len(column) for i, column in enumerate(columns) if column is not None}
    if not counts:
        raise ValueError("input has no tensor to split; a mini-batch needs at least one, so that it has rows")
    first = next(iter(counts))
    for i, count in counts.items():
        if count != counts[first]:
            raise ValueError(
                f"chunks={chunks} makes {_story(value, first, counts[first])} but {_story(value, i, count)}; "
                "tensors of one mini-batch must give equally many"
            )
    return counts[first]


def _story(value: Any, index: int, count: int) -> str:
    shape = tuple(pytree.tree_leaves(value)[index].shape)
    return f"{count} micro-batches of {leaf_path(value, index, 'input')} with shape {shape}"
