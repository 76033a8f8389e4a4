"""The rule of each leaf of a value."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec

from ._rules import ROWS, Mean, Replicate, Rule, Split, Sum, wraps
from ._tree import Place, children, describe, flatten, leaves_of, unflatten


class Leafwise(tuple[Rule, ...]):
    """A spec with one rule for each leaf, in tree order."""

    __slots__ = ()


def rules(tree: Any, spec: Any = None, root: str = "input") -> list[Rule]:
    """The rule of each leaf of `tree`, in the order of `flatten`; None for a leaf that is None.

    Args:
        tree: a value without rules in it; see `unwrap`.
        spec: a prefix of `tree`. A rule in it applies to the whole branch in its place; None is the default.
        root: the name of the tree in messages.

    Returns:
        `Split`, `Replicate`, `Mean`, `Sum` or None, as many as `flatten` finds leaves.

    Raises:
        TypeError: a leaf has no rule and cannot be cut.
        ValueError: `spec` has another shape than `tree`.

    >>> import torch
    >>> rules({'x': torch.ones(2), 'n': 3, 'none': None}, {'x': None, 'n': Replicate(), 'none': None})
    [Split(0), Replicate(), None]
    """
    return ruled(tree, spec, root).rules


class Ruled(NamedTuple):
    """The leaves of a value, with the rule of each."""

    value: Any
    leaves: list[Any]
    rules: list[Rule]
    tree: TreeSpec


def ruled(value: Any, spec: Any, root: str) -> Ruled:
    """See `rules`. Computes all that is needed of a value in one walk, since it may have thousands of leaves."""
    return _ruled(value, *flatten(value), spec, root)


def cut_rules(value: Any, spec: Any) -> Ruled:
    """An input without rules in it, and the rules by which it is cut."""
    leaves, tree = flatten(value)
    if any(map(wraps, leaves)):
        value, spec = _unwrapped(value, leaves, tree, spec)
        leaves, tree = flatten(value)
    found = _ruled(value, leaves, tree, spec, "input")
    for i, rule in enumerate(found.rules):
        if isinstance(rule, Mean | Sum):
            raise TypeError(
                f"the spec says {rule!r} for {Place(value, i, 'input')}, which puts outputs together; an input needs "
                "Split(dim) or Replicate()"
            )
    return found


def _ruled(value: Any, leaves: list[Any], tree: TreeSpec, spec: Any, root: str) -> Ruled:
    if spec is None:
        _refuse_packed(value, root)
        asked: list[Rule] = [None] * len(leaves)
    else:
        asked = list(_broadcast(value, spec, root))
    settled = [
        ROWS if rule is None and isinstance(leaf, Tensor) else _settle(leaf, rule, Place(value, i, root))
        for i, (leaf, rule) in enumerate(zip(leaves, asked, strict=True))
    ]
    return Ruled(value, leaves, settled, tree)


def unwrap(value: Any, spec: Any = None) -> tuple[Any, Any]:
    """Separate a value from the rules in it.

    Args:
        value: a tree, with or without `Split` and `Replicate` around parts.
        spec: further rules, as for `scatter`.

    Returns:
        The value without rules, and a spec with all rules, for `scatter(value, chunks, spec)`.

    Raises:
        ValueError: `spec` does not fit `value`, or contradicts a rule in it.

    >>> unwrap({'x': 1, 'n': Replicate(2)})
    ({'x': 1, 'n': 2}, (None, Replicate()))
    """
    if isinstance(value, Tensor):
        return value, spec
    leaves, tree = flatten(value)
    return _unwrapped(value, leaves, tree, spec) if any(map(wraps, leaves)) else (value, spec)


def _unwrapped(value: Any, leaves: list[Any], tree: TreeSpec, spec: Any) -> tuple[Any, Any]:
    asked = _broadcast(value, spec, "input")
    told = [
        _told(leaf, rule, Place(value, i, "input")) for i, (leaf, rule) in enumerate(zip(leaves, asked, strict=True))
    ]
    bare = unflatten([leaf.value if wraps(leaf) else leaf for leaf in leaves], tree)
    return unwrap(bare, Leafwise(rule for rules in told for rule in rules))


def _told(leaf: Any, rule: Rule, place: Place) -> list[Rule]:
    """The rules of the leaves in a leaf, which may be a value with a rule of its own."""
    if not wraps(leaf):
        return [rule]
    own = Split(leaf.dim) if isinstance(leaf, Split) else Replicate()
    if rule not in (None, own) and not _is_uncuttable(leaf.value):
        raise ValueError(f"{place} is given as {own!r}, but the spec says {rule!r}; declare it in one place")
    if isinstance(own, Split):
        _refuse_packed(leaf.value, str(place))
    return [own] * len(leaves_of(leaf.value))


def _is_uncuttable(value: Any) -> bool:
    """Whether ``value`` has no tensors, so that ``Replicate()`` is its only possible rule."""
    return not any(isinstance(leaf, Tensor) or wraps(leaf) for leaf in leaves_of(value))


def _settle(leaf: Any, rule: Rule, place: Place) -> Rule:
    if isinstance(rule, Replicate):
        return rule
    if leaf is None:
        return None
    if isinstance(leaf, Tensor):
        return rule
    if isinstance(rule, Mean | Sum) and isinstance(leaf, int | float | complex):
        return rule
    raise TypeError(
        f"{place} is of type {type(leaf).__name__}, which cannot be split; expected a tensor, None or a tree of them; "
        "Replicate() around it, or in the spec, hands it whole to every micro-batch"
    )


def _broadcast(tree: Any, spec: Any, path: str) -> Iterator[Rule]:
    if isinstance(spec, Leafwise):
        yield from spec
        return
    if spec is None or (isinstance(spec, Split | Replicate | Mean | Sum) and not wraps(spec)):
        if not isinstance(spec, Replicate):
            _refuse_packed(tree, path)
        yield from [spec] * len(leaves_of(tree))
        return
    wanted = children(spec)
    if wanted is None:
        raise TypeError(
            f"spec for {path} is {spec!r}; expected Split(dim), Replicate(), None or a tree of them (for an output "
            "also Mean() or Sum())"
        )
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
    """Whether both are the same dataclass. Their branches may differ, since torch leaves out fields that are None."""
    return is_dataclass(spec) and type(tree) is type(spec)


def _refuse_packed(tree: Any, path: str) -> None:
    """Raise for a PackedSequence: consecutive rows belong to different samples, so cutting it would mix them."""
    if isinstance(tree, Tensor):
        return
    for i, leaf in enumerate(leaves_of(tree, is_leaf=_is_packed)):
        if _is_packed(leaf):
            raise TypeError(
                f"{Place(tree, i, path)} belongs to a PackedSequence, whose rows are no samples; pad it, "
                "or Replicate() it in the spec"
            )


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)
