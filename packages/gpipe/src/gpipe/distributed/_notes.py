"""Notes as JSON: data that gpipe sends along with tensors, such as how the blocks of a flattened model are called."""

from __future__ import annotations

from typing import Any

from microbatch import flatten, unflatten

from .._flatten._tree import Tree
from ..values._constants import Note
from ._constants import read, written
from ._trees import read_tree, written_tree

_HOLE = ["leaf"]


def written_leaf(leaf: Any) -> Any:
    """A leaf that is not a tensor, as JSON holds it. Raises TypeError if it is neither a constant nor a note."""
    return ["note", _written_note(leaf.content)] if isinstance(leaf, Note) else written(leaf)


def read_leaf(leaf: Any) -> Any:
    """The leaf that :func:`written_leaf` has written. Raises ValueError if ``leaf`` is nothing of the kind."""
    return Note(_read_note(leaf[1])) if isinstance(leaf, list) and leaf[0] == "note" else read(leaf)


def _written_note(content: Any) -> Any:
    leaves, spec = flatten(content)
    return written_tree(spec, map(_written_part, leaves))


def _read_note(tree: Any) -> Any:
    leaves: list[Any] = []
    spec = read_tree(tree, _read_part, leaves)
    return unflatten(leaves, spec)


def _written_part(part: Any) -> Any:
    if isinstance(part, Tree):
        return ["Tree", written_tree(part.spec, iter([_HOLE] * part.spec.num_leaves))]
    return ["set", *sorted(map(written, part))] if isinstance(part, frozenset) else written(part)


def _read_part(part: Any) -> Any:
    match part:
        case ["Tree", tree]:
            return Tree(read_tree(tree, _read_hole, []))
        case ["set", *items]:
            return frozenset(map(read, items))
    return read(part)


def _read_hole(leaf: Any) -> None:
    if leaf != _HOLE:
        raise ValueError(f"{leaf!r} is no leaf of a tree")
