"""The leaves of a mini-batch that are not tensors: constants are passed whole to each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from microbatch import Replicate, Split, flatten, is_flat, leaf_paths, unflatten

from ..values._constants import is_constant
from ..values._leaves import Arguments

_WAY_OUT = "make a tensor of it, or put Replicate() around it if each micro-batch is to get it whole"


def replicated(value: Any, root: str, dim: int = 0) -> Any:
    """``value``, called ``root`` in errors, with ``Replicate()`` around constants, such as numbers and strings.

    A value without tensors does not change. TypeError if another leaf is no tensor, or a list of constants has as many
    entries as the mini-batch has rows, along ``dim``: they would not be cut.
    """
    if is_flat(value):
        return value
    leaves, tree = flatten(value)
    if not any(isinstance(leaf, Tensor | Split) for leaf in leaves):
        return value
    totals = {_rows(leaf, dim) for leaf in leaves} - {0, 1}
    for found in _lists(value):
        if len(found) in totals:
            raise TypeError(
                f"{root} has a {type(found).__name__} of {len(found)}, as many as the mini-batch has rows, but cannot "
                f"be cut into micro-batches: {found!s:.60}; {_WAY_OUT}"
            )
    for k, leaf in enumerate(leaves):
        if leaf is not None and not isinstance(leaf, Tensor | Split | Replicate):
            if not is_constant(leaf):
                path = list(leaf_paths(value, root))[k]
                raise TypeError(f"{path} is of type {type(leaf).__name__}, which cannot be cut by rows; {_WAY_OUT}")
            leaves[k] = Replicate(leaf)
    return unflatten(leaves, tree)


def _rows(leaf: Any, dim: int) -> int:
    tensor, dim = (leaf.value, leaf.dim) if isinstance(leaf, Split) else (leaf, dim)
    return tensor.shape[dim] if isinstance(tensor, Tensor) and -tensor.dim() <= dim < tensor.dim() else 0


def _lists(value: Any) -> Iterator[Sequence[Any]]:
    if isinstance(value, Arguments):
        parts = [*value.args, *value.kwargs.values()]
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple) and not is_constant(value):
        parts = list(value)
        # With tensors in it, it has as many parts as its author wanted.
        if not any(isinstance(leaf, Tensor | Split | Replicate) for leaf in flatten(value)[0]):
            yield value
    else:
        return
    for part in parts:
        yield from _lists(part)
