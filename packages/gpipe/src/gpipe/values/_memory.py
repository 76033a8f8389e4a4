"""Which tensors share memory."""

from __future__ import annotations

import torch
from torch import Tensor


def storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without overlap; then a clone has the same strides."""
    # Then torch.empty_like keeps the strides; an expanded tensor without elements counts as contiguous.
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
