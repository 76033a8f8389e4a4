"""Validate mini-batches and targets, move them to their device, and split them by rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import (
    Batch,
    Entries,
    Replicate,
    Split,
    Versions,
    check,
    flatten,
    is_flat,
    leaf_paths,
    map_tensors,
    rules,
    scatter_views,
    unflatten,
    unwrap,
)

from ..values._constants import is_constant
from ..values._leaves import Arguments
from ._arguments import closest_name


class Checked(NamedTuple):
    """A value that can be split.

    Attributes:
        bare: the value without the rules that the caller wrapped around its parts.
        spec: a spec that contains these rules.
        root: the name of the value in errors.
    """

    bare: Any
    spec: Any
    root: str


def check_batch(value: Any, spec: Any, root: str = "input") -> Checked:
    """Check that ``value`` can be split according to ``spec``. Non-tensor leaves are passed whole to each micro-batch.

    If ``spec`` is a tree, it must contain ``Replicate()`` for them.
    """
    if isinstance(value, Tensor) and spec is None:
        return Checked(value, None, root)
    if isinstance(value, Arguments) and not value.args and isinstance(spec, Mapping):
        spec = Arguments((), _select_rules(spec, value.kwargs, root))
    if spec is None or isinstance(spec, Split):
        value = replicate_constants(value, root, 0 if spec is None else spec.dim)
    elif isinstance(value, Arguments) and isinstance(spec, Arguments):
        value = _replicate_others(spec.kwargs, value, root)
    bare, spec = unwrap(value, spec, root)
    check(bare, spec, root)
    return Checked(bare, spec, root)


def _select_rules(spec: Mapping[str, Any], kwargs: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return the rules for the keywords of this call; ValueError if a rule's name looks like a misspelled keyword."""
    for name in spec.keys() - kwargs.keys():
        if meant := closest_name(name, kwargs.keys() - spec.keys()):
            raise ValueError(
                f"the spec of the {root} has a rule for {name!r}, which is not given; did you mean {meant!r}?"
            )
    return {name: rule for name, rule in spec.items() if name in kwargs}


def split_batch(value: Checked, device: torch.device, chunks: int, least: int = 1) -> tuple[list[Batch], Versions]:
    """Split ``value`` on ``device`` into micro-batches.

    Args:
        chunks: the maximum number of micro-batches.
        least: the minimum number of rows per micro-batch.

    Returns:
        The micro-batches, and an object that synchronizes the version counters of the mini-batch and of its parts.
    """
    bare = value.bare
    there = bare.to(device) if isinstance(bare, Tensor) else map_tensors(lambda tensor: tensor.to(device), bare)
    # Each view has its own version counter, so an in-place layer on one does not count as a change of the rest.
    return scatter_views(there, chunks, value.spec, value.root, least=least)


def are_cut_by_rows(value: Checked, name: str = "labels") -> bool:
    """Return whether the keyword ``name`` is split, and all tensors that are split are split along dimension 0."""
    leaves, tree = flatten(value.bare)
    found = rules(value.bare, value.spec, value.root)
    by_name: Any = unflatten(
        [rule if isinstance(leaf, Tensor) else None for leaf, rule in zip(leaves, found, strict=True)], tree
    )
    own = by_name.kwargs.get(name) if isinstance(by_name, Arguments) else None
    return isinstance(own, Split) and all(rule.dim == 0 for rule in found if isinstance(rule, Split))


def expect_same_rows(targets: Sequence[Batch], inputs: Sequence[Batch]) -> None:
    """Raise ValueError unless every micro-batch of the target has the same number of rows as its input.

    Tensors of an input may differ in rows; each tensor of the target must have the rows of one of them.
    """
    own, others = _columns(targets), _columns(inputs)
    # Equal numbers of micro-batches do not suffice: 3 rows in 2 chunks are 2 and 1, but 4 rows are 2 and 2.
    if any(column not in others for column in own):
        raise ValueError(
            f"target has {_describe_rows(own)}, but the input has {_describe_rows(others)}; a target needs one row per "
            "input row: reshape it, or wrap parts with different rows in Split(..., dim) or Replicate(...)"
        )


def expect_proportional(inputs: Sequence[Batch]) -> None:
    """Raise ValueError unless tensors with n and k·n rows are split at the same samples.

    In 4 chunks, 10 rows are split into 3, 3, 3 and 1, but 20 rows into 5 each.
    """
    if len(inputs[0].rows) < 2:
        return
    first, *others = columns = _columns(inputs)
    if any(rows * first[0] != own * other[0] for other in others for rows, own in zip(other, first, strict=True)):
        raise ValueError(
            f"tensors of the input have {_describe_rows(columns)}, which cannot be split at the same samples; give all "
            "the same number of rows per sample, wrap a tensor that every micro-batch needs whole in Replicate(...), "
            "and one with varying rows per sample in Split(..., counts=...)"
        )


def _columns(batches: Sequence[Batch]) -> list[tuple[int, ...]]:
    return list(zip(*[batch.rows for batch in batches], strict=True))


def _describe_rows(columns: Sequence[tuple[int, ...]]) -> str:
    """
    >>> _describe_rows([(2, 2), (4, 3)])
    '4 and 7 rows (in micro-batches of 2, 2 and 4, 3)'
    """
    rows = " and ".join(str(sum(column)) for column in columns)
    parts = " and ".join(", ".join(map(str, column)) for column in columns)
    return f"{rows} rows (in micro-batches of {parts})"


def _replicate_others(named: Collection[str], value: Arguments, root: str) -> Arguments:
    """Wrap constants in ``value`` in ``Replicate()``, except for the keywords that a spec has ``named``."""
    kept = {name: Replicate(each) for name, each in value.kwargs.items() if name in named}
    found = replicate_constants(Arguments(tuple(map(Replicate, value.args)), {**value.kwargs, **kept}), root)
    return Arguments(
        value.args, {name: each if name in named else found.kwargs[name] for name, each in value.kwargs.items()}
    )


_WAY_OUT = (
    "convert it to a tensor, wrap it in Replicate() if every micro-batch needs it whole, or wrap it in "
    "microbatch.Entries() if it is a list with one entry per row"
)
_CUT = Tensor | Split | Replicate | Entries
"""Types of leaves with a known rule for splitting."""


def replicate_constants(value: Any, root: str, dim: int = 0) -> Any:
    """Wrap constants in ``value``, such as numbers and strings, in ``Replicate()``, if it contains tensors.

    Args:
        root: the name of the value in errors.
        dim: the dimension of rows.

    Raises:
        TypeError: a leaf is neither a tensor nor a constant, or a list of constants has one entry per row of the
            mini-batch, and would not be split.
    """
    if is_flat(value):
        return value
    leaves, tree = flatten(value)
    if not any(isinstance(leaf, _CUT) for leaf in leaves):
        return value
    totals = {_rows(leaf, dim) for leaf in leaves} - {0, 1}
    for found in _lists(value):
        if len(found) in totals:
            raise TypeError(
                f"{root} has a {type(found).__name__} of {len(found)} entries, one per row of the mini-batch, which "
                f"cannot be split into micro-batches: {found!s:.60}; {_WAY_OUT}"
            )
    for k, leaf in enumerate(leaves):
        if leaf is not None and not isinstance(leaf, _CUT):
            if not is_constant(leaf):
                path = list(leaf_paths(value, root))[k]
                raise TypeError(f"{path} is of type {type(leaf).__name__}, which cannot be split by rows; {_WAY_OUT}")
            leaves[k] = Replicate(leaf)
    return unflatten(leaves, tree)


def _rows(leaf: Any, dim: int) -> int:
    tensor, dim = (leaf.value, leaf.dim) if isinstance(leaf, Split) else (leaf, dim)
    return tensor.shape[dim] if isinstance(tensor, Tensor) and -tensor.dim() <= dim < tensor.dim() else 0


def _lists(value: Any) -> Iterator[Sequence[Any]]:
    if isinstance(value, Arguments):
        parts = [*value.args, *value.kwargs.values()]
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple) and not is_constant(value):
        parts = list(value)
        # A list that contains tensors is a structure, whose length is unrelated to rows.
        if not any(isinstance(leaf, _CUT) for leaf in flatten(value)[0]):
            yield value
    else:
        return
    for part in parts:
        yield from _lists(part)
