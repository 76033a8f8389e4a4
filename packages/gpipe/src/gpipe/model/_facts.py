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

    def is_like(self, other: Answer) -> bool:
        """Return whether both are of one block, with tensors and constants in the same places."""
        same = (self.block, self.tree) == (other.block, other.tree)
        return same and [*map(_kind, self.leaves)] == [*map(_kind, other.leaves)]


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


def joined_facts(found: Sequence[Facts], model: str) -> Facts:
    """Return what the forwards of one run have shown.

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
    used, changed = (
        frozenset[Place]().union(*each) for each in zip(*[(facts.used, facts.changed) for facts in found], strict=True)
    )
    # Sizes change from run to run. Those of the first micro-batch are compared with those of all rows.
    return Facts(first.answers, used, changed, any(facts.changes_inputs for facts in found))


def _kind(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Place) else isinstance(leaf, Shape)


def _names(facts: Facts) -> str:
    return f"{len(facts.answers)} calls, the last of {facts.answers[-1].block!r}" if facts.answers else "none"


def kind_of(value: Any) -> tuple[Any, ...]:
    """Return what may decide which blocks a forward calls: names, constants, and the dtypes and ranks of tensors."""
    leaves, tree = flatten(value)
    return repr(tree), *[(x.dtype, x.dim()) if isinstance(x, Tensor) else repr(x) for x in leaves]
