"""Resolve a spec into one rule per leaf."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec

from ._arguments import Arguments
from ._paths import LeafPath, children, describe
from ._rules import ROWS, Entries, Mean, NoValue, Replicate, Rule, Split, Sum, resolve_rule, wraps
from ._tree import flatten, list_leaves, unflatten


class Leafwise(tuple[Rule, ...]):
    """A spec with one rule per leaf, in tree order."""

    __slots__ = ()


def rules(tree: Any, spec: Any = None, root: str = "input") -> list[Rule]:
    """Return the rule of each leaf of `tree`, in the order of `flatten`.

    Args:
        tree: a value without rules in it; see `unwrap`.
        spec: a prefix of `tree`. A rule in it applies to the whole corresponding branch. None, or a key that a mapping
            omits, selects the default rule.
        root: the name of the tree in error messages.

    Returns:
        `Split`, `Replicate`, `Entries`, `Mean` or `Sum` per leaf; None for a leaf that is None and has no rule.

    Raises:
        TypeError: a leaf has no rule and cannot be split.
        ValueError: `spec` is not a prefix of `tree`.

    >>> import torch
    >>> rules({'x': torch.ones(2), 'n': 3, 'none': None}, {'x': None, 'n': Replicate(), 'none': None})
    [Split(0), Replicate(), None]
    """
    return assign_rules(tree, spec, root).rules


def unwrap(value: Any, spec: Any = None, root: str = "input") -> tuple[Any, Any]:
    """Separate a value from the rules in it.

    Args:
        value: a tree, parts of which may be wrapped in `Split`, `Replicate` or `Entries`.
        spec: additional rules, as for `scatter`.
        root: the name of the value in error messages.

    Returns:
        The value without rules, and a spec with all rules, for `scatter(value, chunks, spec)`.

    Raises:
        ValueError: `spec` is not a prefix of `value`, or contradicts a rule in it.

    >>> unwrap({'x': 1, 'n': Replicate(2)})
    ({'x': 1, 'n': 2}, (None, Replicate()))
    """
    if isinstance(value, Tensor) and spec is None:
        return value, None
    leaves, tree = flatten(value)
    if not any(map(wraps, leaves)):
        return value, spec if spec is None else _resolve_rules(value, spec, root)
    asked = enumerate(zip(leaves, _broadcast(value, spec, root), strict=True))
    rules = [rule for i, (leaf, outer) in asked for rule in _inner_rules(leaf, outer, LeafPath(value, i, root))]
    # A rule may wrap a value that contains rules.
    return unwrap(unflatten([leaf.value if wraps(leaf) else leaf for leaf in leaves], tree), Leafwise(rules), root)


def _inner_rules(leaf: Any, rule: Rule, place: LeafPath) -> list[Rule]:
    """Return the rules of the leaves in `leaf`, which may be a value that is wrapped in a rule."""
    if not wraps(leaf):
        return [rule]
    own = replace(leaf, value=NoValue)
    inner = list_leaves(leaf.value)
    if isinstance(own, Entries) and not inner:
        raise ValueError(f"{place} is given as Entries(), but there is nothing in it: {leaf.value!r:.60}")
    # A value without tensors can only be replicated, so an outer rule is not a conflict: it applies to other leaves.
    if rule not in (None, own) and any(isinstance(each, Tensor) or wraps(each) for each in inner):
        raise ValueError(f"{place} has two rules, {own!r} and {rule!r}; give it one rule")
    return [own] * len(inner)


def _resolve_rules(value: Any, spec: Any, root: str) -> Leafwise:
    batch = value.kwargs if isinstance(value, Arguments) and not value.args else value
    return Leafwise([resolve_rule(rule, batch) for rule in _broadcast(value, spec, root)])


def entry_lists(value: Any, rules: Sequence[Rule], place: str) -> list[list[Any]]:
    """Find the lists in `value` with the rule `Entries()`, given the rule of each leaf.

    Raises:
        TypeError: a value that is not a list has the rule `Entries()`.
    """
    if type(value) is list and rules and isinstance(rules[0], Entries) and all(rule is rules[0] for rule in rules):
        return [value]
    branches = children(value)
    if branches is None:
        if isinstance(rules[0], Entries):
            raise TypeError(
                f"{place} is of type {type(value).__name__}, but Entries() needs a list with one entry per row"
            )
        return []
    found, at = list[list[Any]](), 0
    for label, branch in branches:
        count = len(list_leaves(branch))
        found += entry_lists(branch, rules[at : at + count], place + label)
        at += count
    return found


class Ruled(NamedTuple):
    value: Any
    leaves: list[Any]
    rules: list[Rule]
    tree: TreeSpec


def cut_rules(value: Any, spec: Any, root: str) -> Ruled:
    found = assign_rules(*unwrap(value, spec, root), root)
    for i, rule in enumerate(found.rules):
        if isinstance(rule, Mean | Sum):
            raise TypeError(
                f"the spec has {rule!r} for {LeafPath(found.value, i, root)}, which combines outputs; an input needs "
                "Split(dim) or Replicate()"
            )
    return found


def assign_rules(value: Any, spec: Any, root: str) -> Ruled:
    leaves, tree = flatten(value)
    asked: list[Rule] = [None] * len(leaves) if spec is None else list(_broadcast(value, spec, root))
    _refuse_packed(value, root)
    pairs = enumerate(zip(leaves, asked, strict=True))
    return Ruled(value, leaves, [_rule(leaf, rule, LeafPath(value, i, root)) for i, (leaf, rule) in pairs], tree)


def _rule(leaf: Any, rule: Rule, place: LeafPath) -> Rule:
    if isinstance(rule, Entries):
        return rule
    if isinstance(leaf, Tensor):
        return ROWS if rule is None else rule
    if isinstance(rule, Replicate):
        return rule
    if leaf is None:
        return None
    if isinstance(rule, Mean | Sum) and isinstance(leaf, int | float | complex):
        return rule
    way_out = _OUT if place.root == "output" else _IN
    raise TypeError(
        f"{place} is of type {type(leaf).__name__}, which cannot be split; expected a tensor, None or a tree of them; "
        f"{way_out}"
    )


_IN = "wrap it in Replicate() to pass it whole to every micro-batch"
_OUT = "use Replicate() in the spec (of a pipe, in out_spec) if it is the same for all micro-batches"


def _broadcast(tree: Any, spec: Any, path: str) -> Iterator[Rule]:
    """Yield the rule of each leaf of `tree`, given the prefix `spec`; None if `spec` has no rule for it."""
    if isinstance(spec, Leafwise):
        yield from spec
        return
    if spec is None or (isinstance(spec, Split | Replicate | Entries | Mean | Sum) and not wraps(spec)):
        yield from [spec] * len(list_leaves(tree))
        return
    wanted = children(spec)
    if wanted is None:
        raise TypeError(
            f"spec for {path} is {spec!r}; expected Split(dim), Replicate(), None or a tree of them (for an output "
            "also Mean() or Sum(), for an input also Entries())"
        )
    found, by_label = children(tree), dict(wanted)
    # Two instances of a dataclass may have different branches, because torch omits fields that are None.
    alike = is_dataclass(spec) and type(tree) is type(spec)
    labels = {label for label, _ in found or ()}
    fits = by_label.keys() <= labels if isinstance(spec, Mapping) else by_label.keys() == labels
    if found is None or not (alike or fits):
        raise ValueError(
            f"spec does not fit {path}: spec has {describe(wanted)}, {path} has {describe(found)}; "
            "give one rule for all of it, or one per branch"
        )
    for label, branch in found:
        yield from _broadcast(branch, by_label.get(label), path + label)


def _refuse_packed(tree: Any, root: str) -> None:
    """Raise for a PackedSequence, whose consecutive rows belong to different samples."""
    if any(map(_is_packed, list_leaves(tree, _is_packed))):
        raise TypeError(f"{root} has a PackedSequence, whose rows are not samples; pad it, and pack it in a layer")


def _is_packed(node: Any) -> bool:
    return isinstance(node, PackedSequence)
