"""Walk the branches of a tree, and name its leaves by path in error messages."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch.utils._pytree as pytree

from ._plain import branches, is_plain


class LeafPath(NamedTuple):
    """The leaf of `tree` with index `leaf`. `str()` computes its path, which only error messages need.

    >>> str(LeafPath({'x': 1, 'y': (2, 3)}, 2, 'input'))
    "input['y'][1]"
    """

    tree: Any
    leaf: int
    root: str

    def __str__(self) -> str:
        return list(leaf_paths(self.tree, self.root))[self.leaf]


def leaf_paths(tree: Any, path: str) -> Iterator[str]:
    """Iterate over the path of each leaf of `tree`, in the order of `flatten`.

    Args:
        tree: any object.
        path: the name of the tree, the prefix of all paths.

    Returns:
        An iterator over the paths.

    >>> list(leaf_paths({'x': 1, 'y': (2, 3)}, 'input'))
    ["input['x']", "input['y'][0]", "input['y'][1]"]
    """
    found = children(tree)
    if found is None:
        yield path
        return
    for label, branch in found:
        yield from leaf_paths(branch, path + label)


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the branches of `tree` with their labels in a path; None if `tree` is a leaf.

    >>> children({'x': 1, 'y': (2, 3)})
    [("['x']", 1), ("['y']", (2, 3))]
    """
    if pytree.tree_is_leaf(tree):
        return branches(tree) if is_plain(tree) else None
    found = pytree.tree_leaves(tree, is_leaf=lambda node: node is not tree)
    return list(zip(_labels(tree, len(found)), found, strict=True))


def _labels(tree: Any, count: int) -> list[str]:
    try:
        named, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    except ValueError:  # a type may be registered without names for its branches
        names: list[Any] = list(tree) if isinstance(tree, Mapping) and len(tree) == count else list(range(count))
        return [f"[{name!r}]" for name in names]
    return [pytree.keystr(path) for path, _ in named]


def describe(branches: list[tuple[str, Any]] | None) -> str:
    if branches is None:
        return "no branches"
    return f"branches {', '.join(label for label, _ in branches)}" if branches else "zero branches"
