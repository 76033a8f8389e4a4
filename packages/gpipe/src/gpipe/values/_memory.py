"""Which tensors share memory."""

from __future__ import annotations

import torch
from torch import Tensor


def storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without overlap; then a clone has the same strides."""
    if tensor.is_contiguous():  # also if there are no elements
        return True
    size = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and step != size:
            return False
        size *= length
    return True


def clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
