"""Replace the device and data of a tensor where ``tensor.data = ...`` cannot."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def swap_data(tensor: Tensor, other: Tensor) -> None:
    """Give ``tensor`` the device and data of ``other``. It keeps its identity, class, attributes and hooks.

    So parameters remain tied, and references to them, such as those of the original model, remain valid.
    """
    # Neither can `tensor.data = ...` change a tensor from or to meta, nor does torch.utils.swap_tensors take those
    # that somebody refers to weakly, as an LSTM refers to its weights.
    before, after = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    torch._C._swap_tensor_impl(tensor, other)
    if before:
        tensor._backward_hooks = None
        tensor._backward_hooks = before
    if after:
        tensor._post_accumulate_grad_hooks = after


def leaf_of(data: Tensor, requires_grad: bool) -> Tensor:
    """``data`` as a separate tensor, for :func:`swap_data`."""
    # Not by detach(), after which torch forbids `.data = ...`.
    return nn.Parameter(data, requires_grad=requires_grad)
