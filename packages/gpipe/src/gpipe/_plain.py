"""What may stand beside tensors in a value that goes from one stage to the next: plain constants."""

from __future__ import annotations

import enum
from dataclasses import is_dataclass
from numbers import Number
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

_CONSTANTS = (
    *(NoneType, Number, str, bytes, enum.Enum, range, slice, type, EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.SymInt, torch.SymFloat),
)


def is_flat(value: Any) -> bool:
    """Whether ``value`` is one tensor, or a plain tuple of tensors, as most layers give."""
    if isinstance(value, Tensor):
        return True
    if type(value) is not tuple:
        return False
    for each in value:  # noqa: SIM110 — a loop costs half of all(...)
        if not isinstance(each, Tensor):
            return False
    return True


def expect_plain(value: Any, partition: int) -> None:
    """Raise TypeError unless ``value`` is made of tensors and constants.

    Any other object may hold tensors that nobody sees. Their gradients would find no way back to the stage before.
    """
    if is_flat(value):
        return
    for index, leaf in enumerate(_pytree.tree_leaves(value)):
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            raise TypeError(
                f"{_path(value, index)} of partition {partition} is of type {type(leaf).__qualname__}, which may hold "
                "tensors whose gradients would be lost; expected tensors, None and constants such as numbers and "
                f"strings, in tuples, lists and dicts; {_way_out(type(leaf))}"
            )


def _path(value: Any, index: int) -> str:
    """How a reader finds leaf number ``index`` of ``value``."""
    try:
        paths = [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(value)[0]]
    except ValueError:  # a type may be registered without the names of its parts
        return f"leaf {index} of the output"
    return f"output{paths[index]}"


def _way_out(kind: type) -> str:
    if is_dataclass(kind):
        return f"make it a tree of tensors by torch.utils._pytree.register_dataclass({kind.__qualname__})"
    return (
        "make it a tree of tensors by "
        f"torch.utils._pytree.register_pytree_node({kind.__qualname__}, flatten, unflatten), or hand its tensors on"
    )
