"""Checks of the leaves that micro-batches have in one place: same kind, same shape, and one row for each of the
input's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ._batch import Batch
from ._tree import Place, children, describe


def aligned(first: Any, other: Any, where: str, path: str) -> Iterator[Any]:
    """The leaves of `other` in the order of those of `first`: mappings may have their keys in another order.

    Raises:
        ValueError: the trees differ; the message begins with `where`, and names the place.
    """
    ours, theirs = children(first), children(other)
    if ours is None and theirs is None:
        yield other
        return
    if ours is None or theirs is None or not _same_labels(first, ours, theirs):
        raise ValueError(f"{where}{path} is {_node(other, theirs)} instead of {_node(first, ours)}")
    if not _same_node(first, other):
        how = " with other constants" if type(first) is type(other) else f" instead of a {type(first).__name__}"
        raise ValueError(f"{where}{path} is a {type(other).__name__}{how}")
    by_label = dict(theirs)
    for label, branch in ours:
        yield from aligned(branch, by_label[label], where, path + label)


def _same_labels(first: Any, ours: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> bool:
    mine, its = [label for label, _ in ours], [label for label, _ in theirs]
    return mine == its or (isinstance(first, Mapping) and set(mine) == set(its))


def _same_node(first: Any, other: Any) -> bool:
    """Whether the roots of the two trees are equal, in any order of keys if that does not matter."""
    return type(first) is type(other) and (isinstance(first, Mapping) or _top(first) == _top(other))


def _top(tree: Any) -> Any:
    return pytree.tree_structure(tree, is_leaf=lambda node: node is not tree)


def _node(tree: Any, branches: list[tuple[str, Any]] | None) -> str:
    return f"a {type(tree).__name__} with {describe(branches)}"


def expect_tensors(parts: Sequence[Any], place: Place) -> None:
    """TypeError or ValueError unless all are tensors of one dtype and as many dimensions."""
    first = parts[0]
    for i, part in enumerate(parts):
        if not isinstance(part, Tensor):
            raise TypeError(
                f"{place} is a tensor in micro-batch 0 but of type {type(part).__name__} in micro-batch {i}"
            )
        # torch.cat would promote the first and skip the second without an error.
        if part.dtype is not first.dtype or part.dim() != first.dim():
            raise unlike(first, part, i, place)


def unlike(first: Tensor, part: Tensor, i: int, place: Place) -> ValueError:
    return ValueError(
        f"{place} is {kind(first)} in micro-batch 0 but {kind(part)} in micro-batch {i}; they may differ in rows only"
    )


def kind(tensor: Tensor) -> str:
    name = "" if type(tensor) is Tensor else type(tensor).__name__ + " "
    return f"{name}{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def same(parts: Sequence[Any], place: Place) -> Any:
    """The first part if all others are equal to it, where NaN equals NaN; else ValueError."""
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
        return first.dtype is other.dtype and first.device == other.device and _equal_tensors(first, other)
    if getattr(first, "shape", ()) != getattr(other, "shape", ()):
        return False  # arrays that cannot be compared
    found = (first == other) | ((first != first) & (other != other))
    return bool(found.all() if hasattr(found, "all") else found)


def _equal_tensors(first: Tensor, other: Tensor) -> bool:
    if first.shape != other.shape:
        return False
    return torch.equal(first, other) or bool(((first == other) | (first.isnan() & other.isnan())).all())


def expect_rows(parts: Sequence[Tensor], batches: Sequence[Batch], place: Place) -> None:
    """Raise ValueError if dimension 0 of the parts does not follow the rows of their micro-batches.

    It may be k times the rows, with the same k for all parts: tokens that were flattened into one dimension are valid.
    A single micro-batch is not checked, nor parts whose rows are unknown.
    """
    if len(parts) == 1 or _are_rows(parts, batches):
        return
    sizes = tuple([part.shape[0] for part in parts])
    columns = list(zip(*[batch.rows for batch in batches], strict=False))
    if columns and sizes not in columns and not any(_are_tokens(parts, sizes, rows) for rows in columns):
        raise ValueError(_message(parts, columns, place))


def _are_rows(parts: Sequence[Tensor], batches: Sequence[Batch]) -> bool:
    """Whether each part has one entry for each row, which is the usual case."""
    for part, batch in zip(parts, batches, strict=True):
        if not batch.rows or part.shape[0] != batch.rows[0]:
            return False
    return True


def weights(batches: Sequence[Batch], place: Place) -> list[float]:
    """The share of each micro-batch in all rows."""
    for i, batch in enumerate(batches):
        if not batch.rows:
            raise ValueError(
                f"{place} is to be a Mean() by rows, but micro-batch {i} does not know how many it has; make it by "
                "batch.call(...) of one that scatter made, or make Batch(value, rows=(n,))"
            )
    rows = [batch.rows[0] for batch in batches]
    return [each / max(1, sum(rows)) for each in rows]


def _are_tokens(parts: Sequence[Tensor], sizes: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether dimension 0 is k times the rows.

    False if another dimension is exactly the rows, as in (time, rows, features): then that dimension is meant.
    """
    times = sum(sizes) // max(1, sum(rows))
    follows = all(size == times * row for size, row in zip(sizes, rows, strict=True))
    return follows and (times < 2 or _other_dimension(parts, rows) is None)


def _other_dimension(parts: Sequence[Tensor], rows: Sequence[int]) -> int | None:
    for dim in range(1, parts[0].dim()):
        if all(part.dim() > dim and part.shape[dim] == row for part, row in zip(parts, rows, strict=True)):
            return dim
    return None


def _message(parts: Sequence[Tensor], columns: Sequence[Sequence[int]], place: Place) -> str:
    shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
    facts = f"the micro-batches have {' or '.join(str(list(rows)) for rows in columns)}, its shapes are {shapes}"
    for rows in columns:
        if (dim := _other_dimension(parts, rows)) is not None:
            return (
                f"{place} has its rows on dimension {dim}, not 0: {facts}; use Split({dim}) for it in the spec, or "
                "Split(0) to concatenate it along dimension 0 all the same"
            )
    return (
        f"{place} does not follow the rows: {facts}; declare in the spec what it is: Mean() or Sum() for one value of "
        "each micro-batch, Replicate() if it is the same for all, Split(dim), or Split(0) to concatenate it anyway"
    )
