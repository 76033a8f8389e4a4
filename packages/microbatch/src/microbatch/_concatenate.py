"""Concatenate tensors."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor


def concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`, also for dtypes that it refuses under autocast.

    Under autocast to bfloat16, `torch.cat` refuses float16 and float8, and under float16 it refuses bfloat16.

    Args:
        tensors: at least one, on one device.
        dim: the dimension along which they are concatenated.

    Returns:
        A tensor of their dtype; of the widest if they differ.

    >>> half = torch.ones(1, dtype=torch.float16)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     concatenate([half, half])
    tensor([1., 1.], dtype=torch.float16)
    """
    device = tensors[0].device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if casts else nullcontext():
        return torch.cat(tuple(tensors), dim)
