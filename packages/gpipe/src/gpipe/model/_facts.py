"""What complete forwards have shown of a model: the calls of its blocks, and which of their outputs it uses itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import flatten


class Place(NamedTuple):
    """A tensor that a block has returned: the number of the call in a forward, and of the tensor in its output."""

    call: int
    leaf: int


class Shape(NamedTuple):
    """Stands for a tensor in the output of a block."""

    size: torch.Size
    dtype: torch.dtype


class Answer(NamedTuple):
    """What a block has returned, without its tensors.

    Attributes:
        block: the name of the block.
        leaves: constants; in place of each tensor a :class:`Shape`, or a :class:`Place` if it was returned there first.
        tree: the structure of output and collected values.
        arguments: the sizes of the tensors among its arguments.
    """

    block: str
    leaves: Sequence[Any]
    tree: Any
    arguments: Sequence[torch.Size]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``, in order."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


class Facts(NamedTuple):
    """What one or more complete forwards have shown.

    Attributes:
        answers: what each call of a block has returned, in the order of the calls.
        used: the tensors among these that the model itself uses, in its own operations or in its output.
        changed: those among the used ones that the model changes in place afterwards.
        changes_inputs: whether the model changes its inputs in place.
    """

    answers: Sequence[Answer]
    used: frozenset[Place]
    changed: frozenset[Place]
    changes_inputs: bool
