"""Cut one tensor: the number of rows of each part, and parts with version counters of their own."""

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._versions import Versions, counter

Sizes = tuple[int, ...]
Chunks = int | Iterable[int]
"""The largest number of micro-batches to make, or the rows of each."""
Deal = Callable[[int], Sizes]
"""A function from the rows of a tensor to those of each of its micro-batches."""
Cut = Callable[[Tensor, Sizes, int], Sequence[Tensor]]


def dealer(chunks: Any) -> Deal:
    """A function that divides rows into `chunks` micro-batches, or into the sizes that `chunks` lists.

    Raises:
        TypeError, ValueError: `chunks` is neither an integer of at least 1 nor some sizes of at least 0.
    """
    # Tested rather than tried: torch.compile of PyTorch 2.11 cannot trace a TypeError of operator.index.
    if isinstance(chunks, list | tuple):
        return _sizes(_explicit(chunks))
    try:
        return partial(_evenly, _count(operator.index(chunks)))
    except TypeError:
        return _sizes(_explicit(chunks))


def _sizes(sizes: Sizes) -> Deal:
    return lambda rows: sizes


def remembering(deal: Deal) -> Deal:
    """``deal``, called once for each number of rows. Not by functools.cache, which torch.compile cannot trace."""
    known: dict[int, Sizes] = {}

    def remembered(rows: int) -> Sizes:
        if rows not in known:
            known[rows] = deal(rows)
        return known[rows]

    return remembered


def _evenly(chunks: int, rows: int) -> Sizes:
    """Sizes as those of `torch.chunk`: rows / chunks rounded up, until none are left."""
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
    """Copies of the parts, through which gradients flow back."""
    if len(sizes) == 1:
        return (tensor,)
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        # The rest is neither traced nor transformed: it uses version counters, and an operation without a functorch
        # rule.
        return [part.clone() for part in tensor.split_with_sizes(sizes, dim)]
    copy = tensor.clone()
    if copy.grad_fn is not None:
        copy.grad_fn.register_prehook(_Unchanged(tensor))
    return _own_versions(copy, sizes, dim)


def views(versions: Versions) -> Cut:
    """A cut into detached parts that share the memory of their tensor; `versions` tracks in-place changes."""

    def view(tensor: Tensor, sizes: Sizes, dim: int) -> Sequence[Tensor]:
        source = tensor.detach()
        if len(sizes) == 1:
            return (source,)  # a single part: it shares the version counter of its source
        parts = _own_versions(source, sizes, dim)
        versions.add(source, parts)
        return parts

    return view


def _own_versions(tensor: Tensor, sizes: Sizes, dim: int) -> Sequence[Tensor]:
    """Views with a version counter each: autograd does not know that they share memory, so `versions` has to."""
    return tensor.unsafe_split_with_sizes(sizes, dim)


class _Unchanged:
    """Raises in the backward if the source of a copy was changed in place."""

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # Not a saved tensor, which would pass the whole source to saved-tensor hooks; these may copy it.
        self._counter, self._version = counter(tensor), tensor._version

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        if self._counter._version != self._version:
            raise RuntimeError(
                f"the source of scatter has been changed in place: it is at version {self._counter._version}, expected "
                f"{self._version}; change it after the backward, or scatter a clone of it"
            )
