"""Pytrees: torch's registered nodes plus every dataclass and mapping, registered or not."""

from collections.abc import Callable, Iterable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from ._plain import is_plain, open_plain


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Flatten a value into its leaves and its structure for `unflatten`.

    Nodes are tuples, lists, dicts, named tuples, types registered with `torch.utils._pytree`, and all other dataclasses
    (their fields) and mappings. None is a leaf.

    Args:
        value: any object.

    Returns:
        The leaves in order, and the structure.

    >>> leaves, tree = flatten({'x': 1, 'y': (2, None)})
    >>> leaves, unflatten([3, 4, 5], tree)
    ([1, 2, None], {'x': 3, 'y': (4, 5)})
    """
    leaves, tree = pytree.tree_flatten(value)
    return pytree.tree_flatten(open_plain(value)) if _holds_plain(leaves) else (leaves, tree)


def unflatten(leaves: Iterable[Any], tree: pytree.TreeSpec) -> Any:
    """Rebuild a value from its leaves and its structure, the inverse of `flatten`.

    An unregistered mapping is created by calling its type with a dict, and a dataclass by setting its fields. Other
    attributes of both are lost.

    Args:
        leaves: one leaf per leaf of the tree.
        tree: the structure that `flatten` returned.

    Returns:
        A value of the same types with these leaves.

    Raises:
        TypeError: a mapping cannot be created from a dict.
        ValueError: the number of leaves does not match the tree.

    >>> leaves, tree = flatten([1, {'x': 2}])
    >>> unflatten([leaf * 10 for leaf in leaves], tree)
    [10, {'x': 20}]
    """
    return pytree.tree_unflatten(leaves, tree)


def list_leaves(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return only the leaves. Nodes count as leaves if `is_leaf` returns True for them."""
    leaves = pytree.tree_leaves(value, is_leaf=is_leaf)
    return pytree.tree_leaves(open_plain(value), is_leaf=is_leaf) if _holds_plain(leaves) else leaves


def _holds_plain(leaves: list[Any]) -> bool:
    return any(is_plain(leaf) for leaf in leaves if not isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply `function` to each tensor of a tree; other leaves do not change.

    Args:
        function: a function of a tensor; its result replaces the tensor.
        value: a tensor, or a tree.

    Returns:
        A tree of the same types; for a single tensor, the result of `function`.

    Raises:
        TypeError: a mapping cannot be created from a dict.

    >>> import torch
    >>> map_tensors(lambda t: t + 1, {'x': torch.zeros(2), 'n': 3})
    {'x': tensor([1., 1.]), 'n': 3}
    """
    if isinstance(value, Tensor):
        return function(value)
    leaves, tree = flatten(value)
    return unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)


def is_flat(value: Any) -> bool:
    """Return whether `value` is one tensor or a plain tuple of tensors, which needs no pytrees.

    Args:
        value: any object.

    Returns:
        True for a tensor or a plain tuple of tensors.

    >>> import torch
    >>> is_flat((torch.ones(2), torch.ones(3))), is_flat([torch.ones(2)])
    (True, False)
    """
    return isinstance(value, Tensor) or is_tensors(value)


def is_tensors(value: Any) -> bool:
    if type(value) is not tuple:
        return False
    for each in value:  # noqa: SIM110 — a loop costs half of all(...)
        if not isinstance(each, Tensor):
            return False
    return True
