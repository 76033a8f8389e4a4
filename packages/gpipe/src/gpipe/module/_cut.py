"""Check mini-batches and targets, move them to their device, and cut them by rows."""

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
from ._arguments import meant_by


class Checked(NamedTuple):
    """A value that can be cut.

    Attributes:
        bare: the value as it was passed, without rules around its parts.
        spec: a spec with these rules.
        root: the name of the value in errors.
    """

    bare: Any
    spec: Any
    root: str


def checked(value: Any, spec: Any, root: str = "input") -> Checked:
    """Check that ``value`` can be cut as ``spec`` says. Other leaves than tensors are passed whole to each micro-batch.

    If ``spec`` is a tree, it has to contain ``Replicate()`` for these.
    """
    if isinstance(value, Tensor) and spec is None:
        return Checked(value, None, root)
    if isinstance(value, Arguments) and not value.args and isinstance(spec, Mapping):
        spec = Arguments((), _given(spec, value.kwargs, root))
    if spec is None or isinstance(spec, Split):
        value = replicated(value, root, 0 if spec is None else spec.dim)
    elif isinstance(value, Arguments) and isinstance(spec, Arguments):
        value = _replicated_beside(spec.kwargs, value, root)
    bare, spec = unwrap(value, spec, root)
    check(bare, spec, root)
    return Checked(bare, spec, root)


def _given(spec: Mapping[str, Any], kwargs: Mapping[str, Any], root: str) -> dict[str, Any]:
    """The rules of those keywords that this call has; ValueError if one of the others may be misspelt."""
    for name in spec.keys() - kwargs.keys():
        if meant := meant_by(name, kwargs.keys() - spec.keys()):
            raise ValueError(
                f"the spec of the {root} has a rule for {name!r}, which is not given; did you mean {meant!r}?"
            )
    return {name: rule for name, rule in spec.items() if name in kwargs}


def cut(value: Checked, device: torch.device, chunks: int, least: int = 1) -> tuple[list[Batch], Versions]:
    """The micro-batches of ``value`` on ``device``, and what makes in-place changes known between both.

    ``least`` is the number of rows that each needs.
    """
    bare = value.bare
    there = bare.to(device) if isinstance(bare, Tensor) else map_tensors(lambda tensor: tensor.to(device), bare)
    # Each view has its own version counter: a layer in place on one does not count as a change of the others.
    return scatter_views(there, chunks, value.spec, value.root, least=least)


def are_cut_by_rows(value: Checked, name: str = "labels") -> bool:
    """Return whether tensors are cut along dimension 0, and the keyword ``name`` among them."""
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
            f"target has {_described(own)}, the input {_described(others)}; a target has a row for each row of the "
            "input; reshape it, or put Split(..., dim) or Replicate(...) around a part of it with other rows"
        )


def expect_proportional(inputs: Sequence[Batch]) -> None:
    """Raise ValueError unless tensors of n and of k·n rows are cut at the same samples.

    10 rows in 4 chunks are 3, 3, 3 and 1, where 20 are 5 each.
    """
    if len(inputs[0].rows) < 2:
        return
    first, *others = columns = _columns(inputs)
    if any(rows * first[0] != own * other[0] for other in others for rows, own in zip(other, first, strict=True)):
        raise ValueError(
            f"tensors of the input have {_described(columns)}, which do not belong together; give all a row for each "
            "sample, or as many for each that both divide evenly into the chunks; or put Replicate(...) around one "
            "that goes whole to each micro-batch, Split(..., counts=...) around one with other numbers for each sample"
        )


def _columns(batches: Sequence[Batch]) -> list[tuple[int, ...]]:
    return list(zip(*[batch.rows for batch in batches], strict=True))


def _described(columns: Sequence[tuple[int, ...]]) -> str:
    """
    >>> _described([(2, 2), (4, 3)])
    '4 and 7 rows (in micro-batches of 2, 2 and 4, 3)'
    """
    rows = " and ".join(str(sum(column)) for column in columns)
    parts = " and ".join(", ".join(map(str, column)) for column in columns)
    return f"{rows} rows (in micro-batches of {parts})"


def _replicated_beside(named: Collection[str], value: Arguments, root: str) -> Arguments:
    """``value`` with ``Replicate()`` around constants among the keywords that a spec has not ``named``."""
    kept = {name: Replicate(each) for name, each in value.kwargs.items() if name in named}
    found = replicated(Arguments(tuple(map(Replicate, value.args)), {**value.kwargs, **kept}), root)
    return Arguments(
        value.args, {name: each if name in named else found.kwargs[name] for name, each in value.kwargs.items()}
    )


_WAY_OUT = (
    "make a tensor of it, or put Replicate() around it if each micro-batch is to get it whole, or microbatch.Entries() "
    "if it is a list with an entry for each row"
)
_CUT = Tensor | Split | Replicate | Entries
"""Leaves that say how they are cut."""


def replicated(value: Any, root: str, dim: int = 0) -> Any:
    """``value``, called ``root`` in errors, with ``Replicate()`` around constants, such as numbers and strings.

    A value without tensors does not change. TypeError if another leaf is no tensor, or a list of constants has as many
    entries as the mini-batch has rows, along ``dim``: they would not be cut.
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
                f"{root} has a {type(found).__name__} of {len(found)}, as many as the mini-batch has rows, but cannot "
                f"be cut into micro-batches: {found!s:.60}; {_WAY_OUT}"
            )
    for k, leaf in enumerate(leaves):
        if leaf is not None and not isinstance(leaf, _CUT):
            if not is_constant(leaf):
                path = list(leaf_paths(value, root))[k]
                raise TypeError(f"{path} is of type {type(leaf).__name__}, which cannot be cut by rows; {_WAY_OUT}")
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
        # With tensors in it, it has as many parts as its author wanted.
        if not any(isinstance(leaf, _CUT) for leaf in flatten(value)[0]):
            yield value
    else:
        return
    for part in parts:
        yield from _lists(part)
