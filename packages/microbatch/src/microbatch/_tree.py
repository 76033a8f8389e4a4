"""Pytrees, and the names of the places in them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch.utils._pytree as pytree


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """The branches of `tree` with the labels that they have in a path; None where `tree` is a leaf.

    >>> children({'x': 1, 'y': (2, 3)})
    [("['x']", 1), ("['y']", (2, 3))]
    """
    if pytree.tree_is_leaf(tree):
        return None
    branches, _ = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    return list(zip(_labels(tree, len(branches)), branches, strict=True))


def _labels(tree: Any, count: int) -> list[str]:
    """Some types are registered without the names of their branches, Hugging Face's ModelOutput among them."""
    try:
        named, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    except ValueError:
        if isinstance(tree, Mapping) and len(tree) == count:
            return [f"[{key!r}]" for key in tree]
        return [f"[{i}]" for i in range(count)]
    return [pytree.keystr(path) for path, _ in named]


def leaf_paths(tree: Any, path: str) -> Iterator[str]:
    """The path of each leaf, in tree order."""
    branches = children(tree)
    if branches is None:
        yield path
        return
    for label, branch in branches:
        yield from leaf_paths(branch, path + label)


def leaf_path(tree: Any, index: int, path: str) -> str:
    """The path of one leaf: slow, and meant for messages.

    >>> leaf_path({'x': 1, 'y': (2, 3)}, 2, 'input')
    "input['y'][1]"
    """
    return list(leaf_paths(tree, path))[index]
