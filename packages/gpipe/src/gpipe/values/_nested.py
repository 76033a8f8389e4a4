"""Nested tensors, whose rows differ in length."""

from __future__ import annotations

import torch
from torch import Tensor


def shape_of(tensor: Tensor) -> tuple[int | list[int], ...]:
    """The shape of ``tensor``; if it is jagged, the number of parts and the shape of all together; else of each part.

    The shape that a jagged tensor has itself is equal for tensors with the same offsets only, not with equal ones.

    >>> shape_of(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged))
    (2, 5)
    """
    if not tensor.is_nested:
        return tensor.shape
    if tensor.layout is torch.jagged:
        return (tensor.size(0), *tensor.values().shape)
    return tuple(tensor._nested_tensor_size().tolist())


def laid_out_like(gradient: Tensor, output: Tensor) -> Tensor:
    """``gradient`` with the offsets of ``output``, which are equal to its own, but which torch takes for others."""
    if not output.is_nested:
        return gradient
    lengths, dim = (output.offsets(), output.lengths()), output._ragged_idx  # type: ignore[attr-defined]
    return torch.nested.nested_tensor_from_jagged(gradient.values(), *lengths, jagged_dim=dim)
