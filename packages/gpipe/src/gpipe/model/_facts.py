"""Facts from complete forwards of a model: the calls of its blocks, and the outputs that the model itself uses."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import flatten


class Place(NamedTuple):
    """A tensor returned by a block: the index of the call in a forward, and the index of the tensor in its output."""

    call: int
    leaf: int


class Shape(NamedTuple):
    """Stands for a tensor in the output of a block."""

    size: torch.Size
    dtype: torch.dtype


class Answer(NamedTuple):
    """The output of a block, without its tensors.

    Attributes:
        block: the name of the block.
        leaves: constants, and for each tensor its :class:`Shape`, or the :class:`Place` that returned it first.
        tree: the structure of output and collected values.
        arguments: the sizes of the tensors among its arguments.
    """

    block: str
    leaves: Sequence[Any]
    tree: Any
    arguments: Sequence[torch.Size]

    def is_like(self, other: Answer) -> bool:
        """Return whether both are outputs of the same block, with tensors and constants in the same places."""
        same = (self.block, self.tree) == (other.block, other.tree)
        return same and [*map(_kind, self.leaves)] == [*map(_kind, other.leaves)]


class Facts(NamedTuple):
    """The facts from one or more complete forwards.

    Attributes:
        answers: the output of each call of a block, in call order.
        used: the returned tensors that the model itself uses, in its own operations or in its output.
        changed: the used tensors that the model modifies in place afterwards.
        changes_inputs: whether the model modifies its inputs in place.
        drew: the names of the generators of Python and NumPy that the model used before its last call of a block.
        numbers: the numbers that the model read from tensors before its last call of a block, as in
            ``x.max().item()`` or ``if x.any():``, by the place in its code; None stands for lists and arrays.
    """

    answers: Sequence[Answer]
    used: frozenset[Place]
    changed: frozenset[Place]
    changes_inputs: bool
    drew: frozenset[str]
    numbers: Mapping[Any, frozenset[Any]]

    def begins_with(self, answers: Sequence[Answer]) -> bool:
        """Return whether the last of ``answers`` is like the one of the same call here."""
        return len(answers) <= len(self.answers) and self.answers[len(answers) - 1].is_like(answers[-1])


NO_FACTS = Facts((), frozenset(), frozenset(), changes_inputs=False, drew=frozenset(), numbers={})


def join_facts(found: Sequence[Facts], model: str) -> Facts:
    """Return the combined facts from the forwards of one run.

    Raises:
        RuntimeError: the forwards called different blocks.
    """
    first = found[0]
    for facts in found[1:]:
        same = len(first.answers) == len(facts.answers) and all(map(Answer.is_like, first.answers, facts.answers))
        if not same:
            raise RuntimeError(
                f"the forward of {model} called different blocks for one micro-batch ({_names(facts)}) than for "
                f"another ({_names(first)}), so the output of the full mini-batch cannot be computed from theirs; "
                "give a loss_fn that returns gpipe.LossSum(total, count), or out_spec="
            )
    used, changed = (
        frozenset[Place]().union(*each) for each in zip(*[(facts.used, facts.changed) for facts in found], strict=True)
    )
    drew = frozenset[str]().union(*(facts.drew for facts in found))
    places = {place: None for facts in found for place in facts.numbers}
    numbers = {place: frozenset[Any]().union(*(each.numbers.get(place, ()) for each in found)) for place in places}
    # Sizes differ between runs. The sizes of the first micro-batch are compared with the full mini-batch.
    return Facts(first.answers, used, changed, any(facts.changes_inputs for facts in found), drew, numbers)


_READS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__")
READS = frozenset([getattr(Tensor, name) for name in _READS])
"""Operations that return the values of a tensor as numbers of Python, or as an array."""

_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


def find_place() -> Any:
    """Return the place in the code of a model, not of torch, that calls an operation."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _kind(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Place) else isinstance(leaf, Shape)


def _names(facts: Facts) -> str:
    return f"{len(facts.answers)} calls, the last of {facts.answers[-1].block!r}" if facts.answers else "none"


def get_kind(value: Any) -> tuple[Any, ...]:
    """Return a key for inputs that may lead to different calls of blocks: names, constants, tensor dtypes and ranks."""
    leaves, tree = flatten(value)
    return repr(tree), *[(x.dtype, x.dim()) if isinstance(x, Tensor) else repr(x) for x in leaves]
