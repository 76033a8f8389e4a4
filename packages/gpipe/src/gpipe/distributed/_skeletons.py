"""Keys for the trees of values, by which their forms are looked up; one takes a microsecond or two."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ..values._aliases import Aliased
from ..values._constants import Note


class UnkeyedError(Exception):
    """A value has no such key."""


def skeleton(value: Any) -> Any:
    """A key that is equal for values of the same types with the same constants, whatever their tensors are.

    Raises:
        UnkeyedError: ``value`` contains more than tensors, tuples, lists, dicts, named tuples and plain constants.
    """
    kind = type(value)
    if kind is Tensor:
        return None
    if kind is tuple or kind is list:
        return kind, *map(skeleton, value)
    if kind is dict or kind is OrderedDict:
        return kind, *map(_constant, value), *map(skeleton, value.values())
    if kind is Aliased:
        return kind, len(value.sources), *_of_plan(value.plan)
    if isinstance(value, tuple) and _is_named(kind):
        return kind, *map(skeleton, value)
    return None if isinstance(value, Tensor) else _constant(value)


def _constant(value: Any) -> Any:
    """The constant with its type, since 1 == True."""
    kind = type(value)
    if kind not in _CONSTANTS:
        raise UnkeyedError
    return kind, value


_CONSTANTS = frozenset({NoneType, EllipsisType, bool, int, str, bytes, torch.dtype, Note})


def _is_named(kind: type) -> bool:
    """Whether ``kind`` is a named tuple, and not a class that torch flattens in another way."""
    return kind not in _pytree.SUPPORTED_NODES and _pytree.is_namedtuple_class(kind)


def _of_plan(plan: Any) -> tuple[Any, ...]:
    leaves = [_constant(constant) if k is None else k for k, constant in plan.leaves]
    return tuple(plan.views), *leaves, _of_spec(plan.tree)


def _of_spec(spec: Any) -> Any:
    kind, context = spec.type, spec.context
    if spec.is_leaf():
        return None
    children = map(_of_spec, spec.children())
    if kind is tuple or kind is list:
        return kind, *children
    if kind is dict or kind is OrderedDict:
        return kind, *map(_constant, context), *children
    if kind is namedtuple:
        return context, *children
    raise UnkeyedError
