"""Dataclasses and mappings that are not registered with torch: they are trees too."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch.utils._pytree as pytree
from torch import Tensor

from ._rules import Mean, Replicate, Split, Sum


class Shape(NamedTuple):
    """Such a value without its branches."""

    type: type
    names: tuple[Any, ...]


class Opened:
    """Such a value as a node of torch's pytrees: its branches are children, and unflattening makes the value again."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def is_plain(leaf: Any) -> bool:
    """Whether a leaf of torch's pytrees is a dataclass or a mapping."""
    if isinstance(leaf, Tensor) or leaf is None:
        return False
    if is_dataclass(leaf):
        return not isinstance(leaf, type | Split | Replicate | Mean | Sum)
    return isinstance(leaf, Mapping)


def branches(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass, or the items of a mapping, in order, with their labels in a path."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", value[key]) for key in value]
    return [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]


def opened(value: Any) -> Any:
    """`value` with every such leaf wrapped, so that torch flattens it completely."""
    return pytree.tree_map(lambda leaf: Opened(leaf) if is_plain(leaf) else leaf, value)


def _flatten(node: Opened) -> tuple[list[Any], Shape]:
    value = node.value
    names = tuple(value) if isinstance(value, Mapping) else tuple(field.name for field in fields(value))
    return [opened(branch) for _, branch in branches(value)], Shape(type(value), names)


def _unflatten(values: Any, shape: Shape) -> Any:
    named = dict(zip(shape.names, values, strict=True))
    try:
        return _mapping(shape.type, named) if issubclass(shape.type, Mapping) else _dataclass(shape.type, named)
    except Exception as error:
        raise TypeError(
            f"a {shape.type.__name__} cannot be made of its parts {', '.join(map(str, shape.names))}: {error}; "
            "register it with torch.utils._pytree.register_pytree_node, which says how"
        ) from error


def _dataclass(kind: Any, named: dict[str, Any]) -> Any:
    """Make a dataclass without its constructor, which may have changed the fields, by scaling for example."""
    value = object.__new__(kind)
    for name, each in named.items():
        object.__setattr__(value, name, each)
    return value


def _mapping(kind: Any, named: dict[Any, Any]) -> Any:
    value = kind(named)
    if list(value) != list(named) or any(value[key] is not each for key, each in named.items()):
        raise ValueError(f"its constructor makes other items of a dict: {list(value)}")
    return value


pytree.register_pytree_node(Opened, _flatten, _unflatten)
