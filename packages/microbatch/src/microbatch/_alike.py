"""Whether what micro-batches hold in one place goes together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ._tree import Place, children, describe


def aligned(first: Any, other: Any, where: str, path: str) -> Iterator[Any]:
    """The leaves of `other` in the order of those of `first`: mappings may have their keys in another order.

    Raises:
        ValueError: begins with `where`, and names the place where the two trees part.
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
    """Whether the trees are the same at their top, where the order of keys does not matter."""
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
        # torch.cat would promote the one and skip the other without a word.
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
    """The first, if all others are equal to it; not-a-number is equal to itself."""
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
