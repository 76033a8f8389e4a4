"""Cutting one tensor: how many rows each part gets, and parts of which an in-place change of one is none of another."""

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._versions import Versions, counter

Sizes = tuple[int, ...]
Chunks = int | Iterable[int]
"""How many micro-batches to make at most, or the rows of each."""
Deal = Callable[[int], Sizes]
"""From the rows of a tensor to those of each of its micro-batches."""
Cut = Callable[[Tensor, Sizes, int], Sequence[Tensor]]


def dealer(chunks: Any) -> Deal:
    """What deals rows so that there are `chunks` micro-batches, or so that they have these sizes whatever the rows.

    Raises:
        TypeError, ValueError: `chunks` is neither an integer of at least 1 nor some sizes of at least 0.
    """
    # Asked before it is tried: torch.compile of PyTorch 2.11 cannot trace a TypeError of operator.index.
    if isinstance(chunks, list | tuple):
        return _sizes(_explicit(chunks))
    try:
        return partial(_evenly, _count(operator.index(chunks)))
    except TypeError:
        return _sizes(_explicit(chunks))


def _sizes(sizes: Sizes) -> Deal:
    return lambda rows: sizes


def remembering(deal: Deal) -> Deal:
    """``deal``, asked once for each number of rows; not by functools.cache, which torch.compile cannot trace."""
    known: dict[int, Sizes] = {}

    def remembered(rows: int) -> Sizes:
        if rows not in known:
            known[rows] = deal(rows)
        return known[rows]

    return remembered


def _evenly(chunks: int, rows: int) -> Sizes:
    """As `torch.chunk`: blocks of the size rounded up, until none is left."""
    if not rows:
        return (0,) * chunks
    size = -(-rows // chunks)
    full, rest = divmod(rows, size)
    return (size,) * full + ((rest,) if rest else ())


def _count(chunks: int) -> int:
    if chunks < 1:
        raise ValueError(f"chunks is {chunks!r}; expected at least 1")
    return chunks


def _explicit(chunks: Any) -> Sizes:
    try:
        sizes = () if isinstance(chunks, str) else tuple(map(operator.index, chunks))
    except TypeError:
        sizes = ()
    if not sizes:
        raise TypeError(f"chunks is {chunks!r}; expected an integer of at least 1, or the rows of each micro-batch")
    if min(sizes) < 0:
        raise ValueError(f"chunks is {list(sizes)}; no micro-batch can have fewer than 0 rows")
    return sizes


def copies(tensor: Tensor, sizes: Sizes, dim: int) -> Sequence[Tensor]:
    """Parts in memory of their own, through which gradients flow back."""
    if len(sizes) == 1:
        return (tensor,)
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        # What follows is neither traced nor transformed: it relies on versions, and on an operator without rules.
        return [part.clone() for part in tensor.split_with_sizes(sizes, dim)]
    copy = tensor.clone()
    if copy.grad_fn is not None:
        copy.grad_fn.register_prehook(_Unchanged(tensor))
    return _own_versions(copy, sizes, dim)


def views(versions: Versions) -> Cut:
    """A cut into parts that share the memory of their tensor, detached; `versions` watches them."""

    def view(tensor: Tensor, sizes: Sizes, dim: int) -> Sequence[Tensor]:
        source = tensor.detach()
        if len(sizes) == 1:
            return (source,)  # no siblings: it counts with its source
        parts = _own_versions(source, sizes, dim)
        versions.add(source, parts)
        return parts

    return view


def _own_versions(tensor: Tensor, sizes: Sizes, dim: int) -> Sequence[Tensor]:
    """Views with a version counter each: what is unsafe is that autograd knows of no relation."""
    return tensor.unsafe_split_with_sizes(sizes, dim)


class _Unchanged:
    """Notices in backward that the source of a copy was changed in place."""

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # Not a saved tensor: that would show the whole source to saved-tensor hooks, which may copy it elsewhere.
        self._counter, self._version = counter(tensor), tensor._version

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        if self._counter._version != self._version:
            raise RuntimeError(
                f"the source of scatter has been changed in place: it is at version {self._counter._version}, expected "
                f"{self._version}; change it after the backward, or scatter a clone of it"
            )
