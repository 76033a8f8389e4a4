"""Micro-batches to mini-batch."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ._batch import Batch
from ._check import is_tensors
from ._spec import Split, rules
from ._tree import children, leaf_path


def gather(batches: Iterable[Batch], spec: Any = None) -> Any:
    """The value that `scatter` would have cut into `batches`: rows concatenated, gradients flowing back into each.

    A single micro-batch is returned as it is, not copied. Under `Replicate()` the leaves must be equal and the first is
    returned; comparing tensors waits for their device, unless they are one object. None must be None everywhere.

    Raises:
        TypeError: something that is no Batch; a leaf that is neither tensor nor None, and not replicated.
        ValueError: no micro-batches; micro-batches that differ in structure, dtype, device, or shape beyond the rows; a
            tensor without dimensions, such as a loss. Each names the path, as in `output['logits']`.

    >>> gather([Batch(torch.tensor([0, 1])), Batch(torch.tensor([2]))])
    tensor([0, 1, 2])
    """
    values = [_value(batch, i) for i, batch in enumerate(batches)]
    if not values:
        raise ValueError("gather got no micro-batches; expected at least one")
    first = values[0]
    if spec is None and isinstance(first, Tensor):
        return _cat(values, 0, "output")
    if spec is None and is_tensors(first) and all(is_tensors(value) and len(value) == len(first) for value in values):
        return tuple(_cat(column, 0, f"output[{i}]") for i, column in enumerate(zip(*values, strict=True)))
    return _gather_tree(values, spec)


def _value(batch: Any, i: int) -> Any:
    if not isinstance(batch, Batch):
        raise TypeError(f"micro-batch {i} is of type {type(batch).__name__}; expected a Batch, as scatter makes them")
    return batch.value


def _gather_tree(values: Sequence[Any], spec: Any) -> Any:
    first = values[0]
    chosen = rules(first, spec, "output")
    tree = pytree.tree_structure(first)
    for i, value in enumerate(values):
        if pytree.tree_structure(value) != tree:
            raise ValueError(f"micro-batch {i} has another structure than micro-batch 0 at {_unlike(first, value)}")
    columns = zip(*map(pytree.tree_leaves, values), strict=True)
    leaves = []
    for i, (column, rule) in enumerate(zip(columns, chosen, strict=True)):
        path = leaf_path(first, i, "output")
        leaves.append(_cat(column, rule.dim, path) if isinstance(rule, Split) else _same(column, path))
    return pytree.tree_unflatten(leaves, tree)


def _cat(parts: Sequence[Any], dim: int, path: str) -> Tensor:
    first = parts[0]
    for i, part in enumerate(parts):
        if not isinstance(part, Tensor):
            raise TypeError(f"{path} is a tensor in micro-batch 0 but of type {type(part).__name__} in micro-batch {i}")
        # torch.cat would promote one and skip the other without a word.
        if part.dtype is not first.dtype or part.dim() != first.dim():
            raise _unlike_parts(first, part, i, path)
    if not -first.dim() <= dim < first.dim():
        raise ValueError(
            f"{path} has shape {tuple(first.shape)} and no dimension {dim} to concatenate along; give it a row "
            "for each sample, or compute it after gather, or Replicate() it by spec="
        )
    return first if len(parts) == 1 else _concatenate(parts, dim, path)


def _concatenate(parts: Sequence[Tensor], dim: int, path: str) -> Tensor:
    try:
        return torch.cat(tuple(parts), dim)
    except RuntimeError:
        first = parts[0]
        for i, part in enumerate(parts):
            if _but_rows(part, dim) != _but_rows(first, dim):
                raise _unlike_parts(first, part, i, path) from None
        raise


def _but_rows(tensor: Tensor, dim: int) -> tuple[object, ...]:
    shape = list(tensor.shape)
    del shape[dim]
    return tensor.device, tensor.layout, shape


def _unlike_parts(first: Tensor, part: Tensor, i: int, path: str) -> ValueError:
    return ValueError(
        f"{path} is {_describe(first)} in micro-batch 0 but {_describe(part)} in micro-batch {i}; micro-batches may "
        "differ in rows only"
    )


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _same(parts: Sequence[Any], path: str) -> Any:
    first = parts[0]
    for i, part in enumerate(parts):
        if not _equal(first, part):
            raise ValueError(
                f"{path} is not the same in micro-batch 0 and micro-batch {i}; it is not split, so all must agree"
            )
    return first


def _equal(first: Any, other: Any) -> bool:
    if first is other:
        return True
    if type(first) is not type(other):
        return False
    if isinstance(first, Tensor):
        return first.dtype is other.dtype and first.device == other.device and torch.equal(first, other)
    return bool(first == other)


def _unlike(first: Any, other: Any, path: str = "output") -> str:
    """The place where two trees part."""
    ours, theirs = children(first), children(other)
    if ours is None or theirs is None or [label for label, _ in ours] != [label for label, _ in theirs]:
        return f"{path}: {_branches(other, theirs)} instead of {_branches(first, ours)}"
    for (label, mine), (_, its) in zip(ours, theirs, strict=True):
        if pytree.tree_structure(mine) != pytree.tree_structure(its):
            return _unlike(mine, its, path + label)
    return f"{path}: {type(other).__name__} instead of {type(first).__name__}"


def _branches(tree: Any, branches: list[tuple[str, Any]] | None) -> str:
    name = type(tree).__name__
    return name if branches is None else f"{name} with {', '.join(label for label, _ in branches) or 'nothing in it'}"
