"""Check mini-batches and targets, move them to their device, and cut them by rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import Batch, Split, Versions, check, map_tensors, scatter_views, unwrap

from ..values._leaves import Arguments
from ._whole import replicated


class Checked(NamedTuple):
    """A value that can be cut.

    Attributes:
        bare: the value as it was passed, without rules around its parts.
        spec: a spec with these rules.
    """

    bare: Any
    spec: Any


def checked(value: Any, spec: Any, root: str = "input") -> Checked:
    """Check that ``value`` can be cut as ``spec`` says. Other leaves than tensors are passed whole to each micro-batch.

    If ``spec`` is a tree, it has to contain ``Replicate()`` for these.
    """
    if isinstance(value, Tensor) and spec is None:
        return Checked(value, None)
    if isinstance(value, Arguments) and not value.args and isinstance(spec, Mapping):
        spec = Arguments((), dict(spec))
    if spec is None or isinstance(spec, Split):
        value = replicated(value, root, 0 if spec is None else spec.dim)
    bare, spec = unwrap(value, spec)
    check(bare, spec)
    return Checked(bare, spec)


def cut(value: Checked, device: torch.device, chunks: int) -> tuple[list[Batch], Versions]:
    """The micro-batches of ``value`` on ``device``, and what makes in-place changes known between both."""
    bare = value.bare
    there = bare.to(device) if isinstance(bare, Tensor) else map_tensors(lambda tensor: tensor.to(device), bare)
    # Each view has its own version counter: a layer in place on one does not count as a change of the others.
    return scatter_views(there, chunks, value.spec)


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
