"""The leaves of a mini-batch that are not tensors: they are passed whole to each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from microbatch import Batch, Replicate, Split, flatten, is_flat, leaf_paths, unflatten

from ..values._constants import is_constant
from ..values._leaves import Arguments

_WAY_OUT = "or put Replicate() around it if each micro-batch is to get it whole"


def replicated(value: Any, root: str) -> Any:
    """``value`` with ``Replicate()`` around leaves that are neither tensors nor None.

    A value without tensors does not change; :func:`microbatch.check` refuses it.

    Raises:
        TypeError: a leaf is an array, or an object that contains tensors, whose rows would not be cut.
    """
    if is_flat(value):
        return value
    leaves, tree = flatten(value)
    whole = [not (leaf is None or isinstance(leaf, Tensor | Split | Replicate)) for leaf in leaves]
    if not any(whole) or not any(isinstance(leaf, Tensor | Split) for leaf in leaves):
        return value
    for k, leaf in enumerate(leaves):
        if whole[k]:
            _expect_no_tensors(leaf, value, k, root)
    return unflatten([Replicate(leaf) if w else leaf for leaf, w in zip(leaves, whole, strict=True)], tree)


def expect_no_rows(value: Any, batches: Sequence[Batch], root: str) -> None:
    """Raise TypeError if an uncut leaf of ``value`` has as many entries as the mini-batch has rows."""
    if len(batches) < 2:
        return
    totals = {sum(column) for column in zip(*[batch.rows for batch in batches], strict=True)} - {1}
    for path, found in _sequences(value, root):
        if len(found) in totals:
            raise TypeError(
                f"{path} is a {type(found).__name__} of {len(found)}, as many as the mini-batch has rows, but cannot "
                f"be cut into micro-batches; make a tensor of it, {_WAY_OUT}"
            )


def _sequences(value: Any, root: str) -> Iterator[tuple[str, Sized]]:
    """The lists without tensors, and other objects with a length, in ``value``, each with its path."""
    if isinstance(value, Arguments):
        for k, each in enumerate(value.args):
            yield from _below(each, f"{root}.args[{k}]")
        for name, each in value.kwargs.items():
            yield from _below(each, f"{root}.kwargs[{name!r}]")
    else:
        yield from _below(value, root)


def _below(value: Any, path: str) -> Iterator[tuple[str, Sized]]:
    if isinstance(value, Tensor | Split | Replicate) or is_constant(value):
        return
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _below(each, f"{path}[{name!r}]")
    elif isinstance(value, Sized) and not isinstance(value, nn.Module):
        # A container with tensors has as many parts as its author wanted: its rows are those of the tensors.
        if not any(isinstance(leaf, Tensor | Split | Replicate) for leaf in flatten(value)[0]):
            yield path, value
        if isinstance(value, list | tuple):
            for k, each in enumerate(value):
                yield from _below(each, f"{path}[{k}]")


def _expect_no_tensors(leaf: Any, value: Any, k: int, root: str) -> None:
    if is_constant(leaf):
        return
    inside = "an array" if getattr(leaf, "ndim", 0) else "tensors inside" if _holds_tensors(leaf, set()) else ""
    if inside:
        path = list(leaf_paths(value, root))[k]
        way = "torch.as_tensor() it" if inside == "an array" else "make it a dataclass, or register it as a pytree"
        what = inside if inside == "an array" else f"a {type(leaf).__name__} with {inside}"
        raise TypeError(f"{path} is {what}, whose rows would not be cut into micro-batches; {way}, {_WAY_OUT}")


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """Whether there are tensors in the attributes of an object, or in those of its attributes."""
    if isinstance(value, Tensor):
        return True
    if is_constant(value) or isinstance(value, nn.Module | FunctionType | ModuleType | type) or id(value) in seen:
        return False
    seen.add(id(value))
    leaves = flatten(value)[0]
    parts = leaves if len(leaves) != 1 or leaves[0] is not value else list(getattr(value, "__dict__", {}).values())
    return any(_holds_tensors(part, seen) for part in parts)
