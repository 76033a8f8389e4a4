"""Describe values in error messages, and define the exception that cancels a stage."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree


class Cancelled(BaseException):
    """Another stage failed, so this one stops. Never reaches the caller."""


def shapes(value: object) -> str:
    """Return the dtypes and shapes of the tensors in ``value``, in the structure of ``value``.

    >>> shapes((torch.zeros(2, 3), None))
    '(float32[2, 3], None)'
    """
    try:
        return repr(_pytree.tree_map(_Shape, value))
    except Exception:  # from a user's class; it must not replace the error that is being described
        return type(value).__name__


class _Shape:
    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    def __repr__(self) -> str:
        if isinstance(self._leaf, torch.Tensor):
            return f"{str(self._leaf.dtype).removeprefix('torch.')}{[*self._leaf.shape]}"
        return "None" if self._leaf is None else type(self._leaf).__name__  # the leaf's repr may fail or be long
