"""The structure of a value, apart from its leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils._pytree import TreeSpec

from microbatch import flatten, leaf_paths, unflatten

MISSING = object()


class Tree:
    """The structure of a value. It can be compared, copied and pickled, unlike torch's own specs.

    >>> leaves, tree = flattened({"x": 1, "y": (2, None)})
    >>> leaves, tree.value(["a", "b", "c"])
    ([1, 2, None], {'x': 'a', 'y': ('b', 'c')})
    """

    __slots__ = ("spec",)

    def __init__(self, spec: TreeSpec) -> None:
        self.spec = spec

    def value(self, leaves: Iterable[Any]) -> Any:
        return unflatten(leaves, self.spec)

    def moved(self, leaves: Iterable[Any], other: Tree) -> list[Any]:
        """The leaves of this structure at the places of another; :data:`MISSING` where this one has none."""
        known = dict(zip(self._paths(), leaves, strict=True))
        return [known.get(path, MISSING) for path in other._paths()]

    def _paths(self) -> list[str]:
        return [*leaf_paths(self.value(range(self.spec.num_leaves)), "")]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and self.spec == other.spec

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: object) -> Tree:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _tree_of, (self.value([0] * self.spec.num_leaves),)


def flattened(value: Any) -> tuple[list[Any], Tree]:
    """The leaves of ``value``, and its structure. None is a leaf."""
    leaves, spec = flatten(value)
    return leaves, Tree(spec)


def _tree_of(value: Any) -> Tree:
    return flattened(value)[1]
