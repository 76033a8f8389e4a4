"""Cut one tensor: the number of rows of each part, and parts with version counters of their own."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ._versions import Versions

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
    # A copy each, and so a version counter each.
    return [part.clone() for part in tensor.split_with_sizes(sizes, dim)]


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
