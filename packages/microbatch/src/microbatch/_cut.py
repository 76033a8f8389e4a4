"""Cutting one tensor, so that an in-place layer on one part is no change of another."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._sizes import Sizes
from ._versions import Versions, counter

Cut = Callable[[Tensor, Sizes, int], Sequence[Tensor]]


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
