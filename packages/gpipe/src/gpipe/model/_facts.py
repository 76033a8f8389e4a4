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

    def is_like(self, other: Answer) -> bool:
        """Return whether both are of one block, with tensors and constants in the same places."""
        kinds = [isinstance(leaf, Shape) for leaf in self.leaves]
        return (
            self.block == other.block
            and self.tree == other.tree
            and kinds == [isinstance(leaf, Shape) for leaf in other.leaves]
        )


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


def joined_facts(found: Sequence[Facts], model: str) -> Facts:
    """Return what several complete forwards of one run have shown.

    Raises:
        RuntimeError: they called different blocks.
    """
    first = found[0]
    for facts in found[1:]:
        same = len(first.answers) == len(facts.answers) and all(map(Answer.is_like, first.answers, facts.answers))
        if not same:
            raise RuntimeError(
                f"the forward of {model} called other blocks for one micro-batch ({_names(facts)}) than for another "
                f"({_names(first)}); so what it computes of all rows cannot be computed from what its blocks returned; "
                "give a loss_fn that returns gpipe.LossSum(total, count), or out_spec="
            )
    return Facts(first.answers, frozenset[Place]().union(*[facts.used for facts in found]))


def _names(facts: Facts) -> str:
    return f"{len(facts.answers)} calls, the last of {facts.answers[-1].block!r}" if facts.answers else "none"


def kind_of(value: Any) -> tuple[Any, ...]:
    """Return what may decide which blocks a forward calls: names, constants, and the dtypes and ranks of tensors."""
    leaves, tree = flatten(value)
    return repr(tree), *[(x.dtype, x.dim()) if isinstance(x, Tensor) else repr(x) for x in leaves]
