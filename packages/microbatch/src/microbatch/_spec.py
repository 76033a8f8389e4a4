"""How each leaf of a value is split."""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ._tree import Place, children, describe


@dataclass(frozen=True)
class Split:
    """The leaf is a tensor, and is cut along `dim`. Without a spec every tensor is cut along dimension 0."""

    dim: int = 0

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            raise TypeError(f"dim of Split is {self.dim!r}; expected an integer, as in Split(1)")


@dataclass(frozen=True)
class Replicate:
    """The leaf goes whole into every micro-batch. All of them share it, so nobody may change it in place."""


Rule = Split | Replicate | None

ROWS = Split(0)


def rules(tree: Any, spec: Any, root: str) -> list[Rule]:
    """One rule for each leaf of `tree`: None where a None passes by itself.

    `spec` is a prefix of `tree`: a rule anywhere in it holds for everything below, and None means the default. `root`
    is what messages call the tree.
    """
    leaves = pytree.tree_leaves(tree)
    asked = list(_broadcast(tree, spec, root))
    return [_settle(leaf, rule, Place(tree, i, root)) for i, (leaf, rule) in enumerate(zip(leaves, asked, strict=True))]


def _settle(leaf: Any, rule: Rule, place: Place) -> Rule:
    if isinstance(rule, Replicate):
        return rule
    if leaf is None:
        return None
    if isinstance(leaf, Tensor):
        return rule or ROWS
    raise TypeError(
        f"{place} is of type {type(leaf).__name__}, which cannot be split; expected a tensor, None or a tree of them; "
        "Replicate() in spec= hands it whole to every micro-batch"
    )


def _broadcast(tree: Any, spec: Any, path: str) -> Iterator[Rule]:
    if spec is None or isinstance(spec, Split | Replicate):
        if not isinstance(spec, Replicate):
            _refuse_packed(tree, path)
        yield from [spec] * len(pytree.tree_leaves(tree))
        return
    wanted = children(spec)
    if wanted is None:
        raise TypeError(f"spec for {path} is {spec!r}; expected Split(dim), Replicate(), None or a tree of them")
    found = children(tree)
    by_label = dict(wanted)
    if found is None or not (_is_same_dataclass(tree, spec) or by_label.keys() == {label for label, _ in found}):
        raise ValueError(
            f"spec does not fit {path}: spec has {describe(wanted)}, {path} has {describe(found)}; "
            "give one rule for all of it, or a rule for each branch"
        )
    for label, branch in found:
        yield from _broadcast(branch, by_label.get(label), path + label)


def _is_same_dataclass(tree: Any, spec: Any) -> bool:
    """Their branches may differ, since torch leaves fields that are None out of the tree."""
    return is_dataclass(spec) and type(tree) is type(spec)


def _refuse_packed(tree: Any, path: str) -> None:
    """Each row of a PackedSequence belongs to another sample than the next: to cut it is to shuffle."""
    for i, leaf in enumerate(pytree.tree_leaves(tree, is_leaf=_is_packed)):
        if _is_packed(leaf):
            raise TypeError(
                f"{Place(tree, i, path)} belongs to a PackedSequence, whose rows are no samples; pad it, "
                "or Replicate() it by spec="
            )


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)
