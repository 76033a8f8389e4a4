"""Cut one tensor: the number of rows of each part, and parts with version counters of their own."""

import operator
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ._join import concatenate
from ._versions import Versions

Sizes = tuple[int, ...]
Cut = Callable[[Tensor, Sizes, int], Sequence[Tensor]]


def counted(chunks: Any) -> int:
    """`chunks` as an int; TypeError or ValueError unless it is an integer of at least 1."""
    try:
        number = operator.index(chunks)
    except TypeError:
        raise TypeError(f"chunks is {chunks!r}; expected an integer of at least 1") from None
    if number < 1:
        raise ValueError(f"chunks is {chunks!r}; expected at least 1")
    return number


def rows_of_parts(rows: int, chunks: int) -> Sizes:
    """The rows of each micro-batch, as by `torch.chunk`: rows / chunks rounded up, until none are left."""
    if not rows:
        return (0,) * chunks
    size = -(-rows // chunks)
    full, rest = divmod(rows, size)
    return (size,) * full + ((rest,) if rest else ())


def rows_of_samples(counts: Sequence[int], samples: Sizes) -> Sizes:
    """The rows of each micro-batch, if it has so many of the `samples`, and these have `counts` rows."""
    rest = iter(counts)
    return tuple([sum(islice(rest, number)) for number in samples])


def copies(tensor: Tensor, sizes: Sizes, dim: int) -> Sequence[Tensor]:
    if len(sizes) == 1:
        return (tensor,)
    # A copy each, and so a version counter each.
    return [part.clone() for part in tensor.split_with_sizes(sizes, dim)]


def views(versions: Versions) -> Cut:
    """A cut into parts that share the memory of their tensor; `versions` tracks in-place changes."""

    def view(tensor: Tensor, sizes: Sizes, dim: int) -> Sequence[Tensor]:
        source = tensor.detach()
        # A single part shares the version counter of its source. Of several, autograd does not know that they share
        # memory, so `versions` has to.
        parts: Sequence[Tensor] = (source,) if len(sizes) == 1 else source.unsafe_split_with_sizes(sizes, dim)
        if len(sizes) > 1:
            versions.add(source, parts)
        return Views.apply(dim, tensor, *parts) if tensor.requires_grad else parts  # type: ignore[no-untyped-call]

    return view


class Views(torch.autograd.Function):
    """The detached parts of a tensor, connected to it."""

    @staticmethod
    def forward(ctx: Any, dim: int, whole: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None, and not zeros, for a part that nobody used
        ctx.dim = dim
        ctx.parts = [(part.shape, part.dtype, part.device) for part in parts]
        # Not the parts themselves: autograd would return views of what a Function was given, which in-place layers must
        # not change.
        return tuple(map(Tensor.detach, parts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rest = (None,) * len(gradients)
        if not [gradient for gradient in gradients if gradient is not None]:
            return None, None, *rest
        parts = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, ctx.parts, strict=True)
        ]
        return None, concatenate(parts, ctx.dim), *rest
