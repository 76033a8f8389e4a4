"""Replace the device and data of a tensor where ``tensor.data = ...`` cannot."""

from __future__ import annotations

from torch import Tensor, nn

from .._torch import swap_implementations


def swap_data(tensor: Tensor, other: Tensor) -> None:
    """Give ``tensor`` the device and data of ``other``. It keeps its identity, class, attributes and hooks.

    So parameters remain tied, and references to them remain valid.
    """
    # `tensor.data = ...` cannot change a tensor from or to meta.
    before, after = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    swap_implementations(tensor, other)
    if before:
        tensor._backward_hooks = None
        tensor._backward_hooks = before
    if after:
        tensor._post_accumulate_grad_hooks = after


def give_data(tensor: Tensor, other: Tensor) -> None:
    try:
        tensor.data = other
    except RuntimeError:  # torch allows this between the usual types of devices only
        swap_data(tensor, leaf_of(other, tensor.requires_grad))


def leaf_of(data: Tensor, requires_grad: bool) -> Tensor:
    """``data`` as a separate tensor, for :func:`swap_data`."""
    # Not by detach(), after which torch forbids `.data = ...`.
    return nn.Parameter(data, requires_grad=requires_grad)
