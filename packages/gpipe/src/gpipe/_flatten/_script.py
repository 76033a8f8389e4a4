"""How the blocks of a model are called, as data: what goes where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..values._constants import is_constant
from ._tree import Tree


class Value(NamedTuple):
    """A tensor among the arguments of a block, by its name."""

    name: str


class Constant(NamedTuple):
    """An argument that is no tensor. 1, 1.0 and True are equal, but no two of them are one constant."""

    kind: type
    text: str
    value: Any


Structure = tuple[Tree, tuple[Any, ...]]
"""A value without its tensors: what puts leaves together, and the leaves, each a :class:`Value` or a constant."""


class BlockRecipe(NamedTuple):
    """How to call a block.

    Attributes:
        leaves: of its arguments, each a :class:`Value` or a :class:`Constant`.
        keep: names of the values that are needed after it.
    """

    tree: Tree
    leaves: tuple[Any, ...]
    keep: frozenset[str]


Recipe = tuple[BlockRecipe, ...]
"""How to call the blocks of a trunk."""


def recipe_of(
    arguments: Sequence[tuple[list[Any], Tree]], fakes: Mapping[int, str], names: Sequence[str], first: int
) -> tuple[Recipe, dict[str, Tensor]]:
    """How to call blocks with these arguments, and the values that this takes beside what blocks return.

    Args:
        arguments: the leaves and the tree of each call.
        fakes: for what stands for outputs of blocks, by identity, their names.
        names: of the blocks, for errors.
        first: the number of the first of them.
    """
    values: dict[str, Tensor] = {}
    known = dict(fakes)
    calls = []
    for j, (leaves, tree) in enumerate(arguments):
        found: list[Value | Constant] = []
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                name = known.setdefault(id(leaf), f"value {first + j}.{k}")
                if name.startswith("value"):
                    values[name] = leaf
                found.append(Value(name))
            else:
                found.append(constant(leaf, f"block {names[j]!r}"))
        calls.append((tree, tuple(found)))
    last = {leaf.name: j for j, (_, leaves) in enumerate(calls) for leaf in leaves if isinstance(leaf, Value)}
    kept = [frozenset(name for name, to in last.items() if to > j) for j in range(len(calls))]
    return tuple([BlockRecipe(*call, keep) for call, keep in zip(calls, kept, strict=True)]), values


def output_name(j: int, m: int = 0) -> str:
    return f"output {j}.{m}"


def constant(leaf: Any, called: str) -> Constant:
    if not is_constant(leaf):
        raise TypeError(
            f"{called} is called with an object of type {type(leaf).__qualname__}, which cannot go from stage to "
            "stage; expected tensors and constants, in tuples, lists and dicts; leave a cache out by use_cache=False"
        )
    return Constant(type(leaf), repr(leaf), leaf)


def structure_of(leaves: Sequence[Any], tree: Tree, called: str) -> Structure:
    """The structure of a value that ``called`` is given; TypeError if a leaf is neither a tensor nor a constant."""
    return tree, tuple([Value("") if isinstance(leaf, Tensor) else constant(leaf, called) for leaf in leaves])


def restored(structure: Structure, tensors: Iterable[Tensor | None]) -> Any:
    tree, leaves = structure
    given = iter(tensors)
    return tree.value([next(given) if isinstance(leaf, Value) else leaf.value for leaf in leaves])
