"""Constants: non-tensor objects that may be passed between stages."""

from __future__ import annotations

import enum
from numbers import Number
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

from microbatch import flatten, is_flat, leaf_paths


class StaticValue:
    """An immutable object that may be passed between stages with tensors. Its content can be pickled."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticValue) and self.content == other.content

    __hash__ = None  # type: ignore[assignment]


_CONSTANTS = (
    StaticValue,
    *(NoneType, Number, str, bytes, enum.Enum, range, slice, type, EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.SymInt, torch.SymFloat),
)


def is_constant(value: Any) -> bool:
    return isinstance(value, _CONSTANTS)


def expect_plain(value: Any, partition: int) -> None:
    """Raise TypeError unless ``value`` consists of tensors and constants.

    Any other object may contain tensors that are not found, so their gradients would not be sent back.
    """
    if isinstance(value, Tensor) or is_flat(value):
        return
    for index, leaf in enumerate(flatten(value)[0]):
        if not (isinstance(leaf, Tensor) or is_constant(leaf)):
            path, kind = list(leaf_paths(value, "output"))[index], type(leaf).__qualname__
            raise TypeError(
                f"{path} of partition {partition} is of type {kind}, which may hold tensors whose gradients would be "
                "lost; expected tensors, None and constants such as numbers and strings, in tuples, lists, dicts and "
                "dataclasses; make it a dataclass, or a tree of tensors by "
                f"torch.utils._pytree.register_pytree_node({kind}, flatten, unflatten), or pass its tensors"
            )
