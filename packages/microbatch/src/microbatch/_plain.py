"""Treat unregistered dataclasses and mappings as pytree nodes."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from ._rules import Entries, Mean, Replicate, Split, Sum


class _Opened:
    """A pytree node that wraps such a value, with its branches as children."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def is_plain(leaf: Any) -> bool:
    if isinstance(leaf, Tensor) or leaf is None:  # test the common cases first, for values with thousands of leaves
        return False
    return isinstance(leaf, Mapping) or (
        is_dataclass(leaf) and not isinstance(leaf, type | Split | Replicate | Entries | Mean | Sum)
    )


def open_plain(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: _Opened(leaf) if is_plain(leaf) else leaf, value)


def branches(value: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass, or the items of a mapping, in order, with their labels in a path."""
    label = "[{!r}]" if isinstance(value, Mapping) else ".{}"
    return [(label.format(name), branch) for name, branch in _to_dict(value).items()]


def _to_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return {key: value[key] for key in value}
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _flatten(node: _Opened) -> tuple[list[Any], tuple[type, tuple[Any, ...]]]:
    named = _to_dict(node.value)
    return list(map(open_plain, named.values())), (type(node.value), tuple(named))


def _unflatten(values: Any, shape: tuple[type, tuple[Any, ...]]) -> Any:
    kind, names = shape
    named = dict(zip(names, values, strict=True))
    try:
        return _mapping(kind, named) if issubclass(kind, Mapping) else _dataclass(kind, named)
    except Exception as error:
        raise TypeError(
            f"a {kind.__name__} cannot be rebuilt from its parts {', '.join(map(str, names))}: {error}; "
            "register it and a function that does so with torch.utils._pytree.register_pytree_node"
        ) from error


def _dataclass(kind: Any, named: dict[str, Any]) -> Any:
    """Create a dataclass without its constructor, which could change the fields a second time."""
    value = object.__new__(kind)
    for name, each in named.items():
        object.__setattr__(value, name, each)
    return value


def _mapping(kind: Any, named: dict[Any, Any]) -> Any:
    value = kind(named)
    if list(value) != list(named) or any(value[key] is not each for key, each in named.items()):
        raise ValueError(f"its constructor changes the items of a dict: {list(value)}")
    return value


pytree.register_pytree_node(_Opened, _flatten, _unflatten)
