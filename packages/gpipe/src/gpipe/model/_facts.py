"""What complete forwards have shown of a model: the calls of its blocks, and which of their outputs it uses itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import flatten, unflatten

Place = tuple[int, int]
"""A tensor that a block has returned: the number of the call in a forward, and of the tensor in its output."""


class Shape(NamedTuple):
    """Stands for a tensor in the output of a block."""

    size: torch.Size
    dtype: torch.dtype


class Answer(NamedTuple):
    """What a block has returned, without its tensors.

    Attributes:
        block: the name of the block.
        leaves: constants, and a :class:`Shape` in place of each tensor.
    """

    block: str
    leaves: Sequence[Any]
    tree: Any

    def filled(self, tensors: Mapping[int, Tensor]) -> tuple[Any, list[Tensor]]:
        """Return output and collected values with these ``tensors``, by number; and placeholders for all others."""
        placeholders: list[Tensor] = []
        leaves = list(self.leaves)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, Shape):
                leaves[k] = tensors.get(k)
                if leaves[k] is None:
                    leaves[k] = torch.zeros((), dtype=leaf.dtype).expand(leaf.size)
                    placeholders.append(leaves[k])
        return unflatten(leaves, self.tree), placeholders


def answer_of(block: str, output: Any, collected: Any) -> tuple[Answer, Sequence[Any]]:
    """Return the answer of ``block`` without tensors, and its leaves: its output, and what hooks inside collected."""
    leaves, tree = flatten((output, collected))
    return Answer(block, [Shape(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves], tree), leaves


class Facts(NamedTuple):
    """What one or more complete forwards have shown.

    Attributes:
        answers: what each call of a block has returned, in the order of the calls.
        used: the tensors among these that the model itself uses, in its own operations or in its output.
    """

    answers: Sequence[Answer]
    used: frozenset[Place]
