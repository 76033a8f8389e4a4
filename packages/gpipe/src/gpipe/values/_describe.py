"""Say where in the pipeline an error happened, without changing what it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree


class Cancelled(BaseException):
    """Another stage failed; there is nothing left to wait for. Never reaches the caller."""


def shapes(value: object) -> str:
    """The types and shapes of all tensors in ``value``, in its own structure.

    >>> shapes((torch.zeros(2, 3), None))
    '(float32[2, 3], None)'
    """
    try:
        return repr(_pytree.tree_map(_Shape, value))
    except Exception:  # of a class of the user's own; it must not take the place of the error that this describes
        return type(value).__name__


class _Shape:
    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    def __repr__(self) -> str:
        if isinstance(self._leaf, torch.Tensor):
            return f"{str(self._leaf.dtype).removeprefix('torch.')}{[*self._leaf.shape]}"
        return "None" if self._leaf is None else type(self._leaf).__name__  # its own repr might fail, or be long
