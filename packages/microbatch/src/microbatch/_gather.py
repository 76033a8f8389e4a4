"""Micro-batches to mini-batch."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ._batch import Batch
from ._check import is_tensors
from ._spec import Split, rules
from ._tree import Place, children, describe


def gather(batches: Iterable[Batch], spec: Any = None) -> Any:
    """The value that `scatter` would have cut into `batches`: rows concatenated, gradients flowing back into each.

    A single micro-batch is returned as it is, not copied. Under `Replicate()` the leaves must be equal and the first is
    returned; comparing tensors waits for their device, unless they are one object. None must be None everywhere.

    Raises:
        TypeError: something that is no Batch; a leaf that is neither tensor nor None and is not replicated.
        ValueError: no micro-batches; micro-batches that differ in structure, dtype, device, or shape beyond the rows; a
            tensor without dimensions, such as a loss. Each names the path, as in `output['logits']`.

    >>> gather([Batch(torch.tensor([0, 1])), Batch(torch.tensor([2]))])
    tensor([0, 1, 2])
    """
    values = [batch.value if isinstance(batch, Batch) else _no_batch(batch, i) for i, batch in enumerate(batches)]
    if not values:
        raise ValueError("gather got no micro-batches; expected at least one")
    first = values[0]
    if spec is None and isinstance(first, Tensor):
        return _cat(values, 0, Place(first, 0, "output"))
    if spec is None and is_tensors(first) and all(is_tensors(value) and len(value) == len(first) for value in values):
        return tuple(_cat(column, 0, Place(first, i, "output")) for i, column in enumerate(zip(*values, strict=True)))
    return _gather_tree(values, spec)


def _no_batch(batch: Any, i: int) -> Any:
    raise TypeError(f"micro-batch {i} is of type {type(batch).__name__}; expected a Batch, as scatter makes them")


def _gather_tree(values: Sequence[Any], spec: Any) -> Any:
    first = values[0]
    chosen = rules(first, spec, "output")
    rows, trees = zip(*map(pytree.tree_flatten, values), strict=True)
    for i, tree in enumerate(trees):
        if tree != trees[0]:
            raise ValueError(f"micro-batch {i} is unlike micro-batch 0: {_unlike(first, values[i])}")
    columns = enumerate(zip(chosen, zip(*rows, strict=True), strict=True))
    leaves = [_leaf(column, rule, Place(first, i, "output")) for i, (rule, column) in columns]
    return pytree.tree_unflatten(leaves, trees[0])


def _leaf(parts: Sequence[Any], rule: object, place: Place) -> Any:
    return _cat(parts, rule.dim, place) if isinstance(rule, Split) else _same(parts, place)


def _cat(parts: Sequence[Any], dim: int, place: Place) -> Tensor:
    first = parts[0]
    for i, part in enumerate(parts):
        if not isinstance(part, Tensor):
            raise TypeError(
                f"{place} is a tensor in micro-batch 0 but of type {type(part).__name__} in micro-batch {i}"
            )
        # torch.cat would promote the one and skip the other without a word.
        if part.dtype is not first.dtype or part.dim() != first.dim():
            raise _unlike_parts(first, part, i, place)
    if not -first.dim() <= dim < first.dim():
        raise ValueError(
            f"{place} has shape {tuple(first.shape)} and no dimension {dim} to concatenate along; give it a row for "
            "each sample, or compute it after gather, or Replicate() it by spec="
        )
    return first if len(parts) == 1 else _concatenate(parts, dim, place)


def _concatenate(parts: Sequence[Tensor], dim: int, place: Place) -> Tensor:
    try:
        return torch.cat(tuple(parts), dim)
    except (RuntimeError, TypeError) as error:
        first = parts[0]
        for i, part in enumerate(parts):
            if _but_rows(part, dim) != _but_rows(first, dim):
                raise _unlike_parts(first, part, i, place) from None
        if first.is_quantized or type(first) is not Tensor:  # neither need know every operator
            raise TypeError(f"{place} is {_kind(first)}, which torch cannot concatenate: {error}") from error
        raise


def _but_rows(tensor: Tensor, dim: int) -> tuple[object, ...]:
    shape = list(tensor.shape)
    del shape[dim]
    return tensor.device, tensor.layout, shape


def _unlike_parts(first: Tensor, part: Tensor, i: int, place: Place) -> ValueError:
    return ValueError(
        f"{place} is {_kind(first)} in micro-batch 0 but {_kind(part)} in micro-batch {i}; they may differ in rows only"
    )


def _kind(tensor: Tensor) -> str:
    name = "" if type(tensor) is Tensor else type(tensor).__name__ + " "
    return f"{name}{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _same(parts: Sequence[Any], place: Place) -> Any:
    first = parts[0]
    for i, part in enumerate(parts):
        if not _equal(first, part):
            raise ValueError(
                f"{place} is not the same in micro-batch {i} as in micro-batch 0; what is not split must be"
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
        return f"{path} is {_node(other, theirs)} instead of {_node(first, ours)}"
    for (label, mine), (_, its) in zip(ours, theirs, strict=True):
        if pytree.tree_structure(mine) != pytree.tree_structure(its):
            return _unlike(mine, its, path + label)
    return f"{path} is a {type(other).__name__} instead of a {type(first).__name__}"


def _node(tree: Any, branches: list[tuple[str, Any]] | None) -> str:
    return f"a {type(tree).__name__} with {describe(branches)}"
