"""Cut one tensor: the number of rows of each part, and parts with version counters of their own."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._versions import Versions, counter

Sizes = tuple[int, ...]
Chunks = int | list[int] | tuple[int, ...]
"""The largest number of micro-batches to make, or the rows of each."""
Cut = Callable[[Tensor, Sizes, int], Sequence[Tensor]]


def counted(chunks: Any) -> int | Sizes:
    """`chunks` as an int, or as a tuple of sizes.

    Raises:
        TypeError, ValueError: `chunks` is neither an integer of at least 1 nor some sizes of at least 0.
    """
    listed = isinstance(chunks, list | tuple)
    try:
        numbers = tuple(map(operator.index, chunks if listed else (chunks,)))
    except TypeError:
        numbers = ()
    if not numbers:
        raise TypeError(f"chunks is {chunks!r}; expected an integer of at least 1, or a list of the rows of each")
    if listed and min(numbers) < 0:
        raise ValueError(f"chunks is {chunks}; no micro-batch can have fewer than 0 rows")
    if not listed and numbers[0] < 1:
        raise ValueError(f"chunks is {chunks!r}; expected at least 1")
    return numbers if listed else numbers[0]


def dealt(rows: int, chunks: int | Sizes) -> Sizes:
    """The rows of each micro-batch, as by `torch.chunk`: rows / chunks rounded up, until none are left."""
    if isinstance(chunks, tuple):
        return chunks
    if not rows:
        return (0,) * chunks
    size = -(-rows // chunks)
    full, rest = divmod(rows, size)
    return (size,) * full + ((rest,) if rest else ())


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
    # Views with a version counter each: the copy is nobody else's, so nobody misses a change.
    return copy.unsafe_split_with_sizes(sizes, dim)


def views(versions: Versions) -> Cut:
    """A cut into detached parts that share the memory of their tensor; `versions` tracks in-place changes."""

    def view(tensor: Tensor, sizes: Sizes, dim: int) -> Sequence[Tensor]:
        source = tensor.detach()
        if len(sizes) == 1:
            return (source,)  # a single part: it shares the version counter of its source
        # Autograd does not know that these share memory, so `versions` has to.
        parts = source.unsafe_split_with_sizes(sizes, dim)
        versions.add(source, parts)
        return parts

    return view


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
