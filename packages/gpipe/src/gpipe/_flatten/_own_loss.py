"""The loss of a mini-batch, from what a model that computes its own loss gives for each micro-batch.

The loss may be a mean over rows, a mean over what counts in them, such as all labels but those of -100, or a sum that
is divided by a number that the caller gives. :mod:`gpipe._flatten._probe` has tried which one it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from microbatch import Arguments, Replicate

from ..engine._loss_value import has_own_loss, own_loss
from ..engine._reductions import Reductions
from ..engine._weights import MiniBatchLoss
from ._ending import split_loss_only

KINDS = ("counts", "rows", "sum")
"""How losses of parts are combined: weighted by what their means divide by, where :class:`Reductions` sees means, added
where it sees sums, else weighted by rows; always weighted by rows; always added."""


NEITHER = (
    "it is neither a mean over rows or over labels that count, nor a sum (a balancing loss of experts is a product of "
    "means; a mean that is divided by hand may be one over any number)"
)
BEYOND = (
    "it cannot be computed from what the last block and the modules after it return for each row, such as where rows "
    "are not dimension 0, or a block returns a loss of its own"
)
UNKNOWN = "it is not a number for the sample, as where no label counts, so that nothing can be tried (give another)"


class CombineError(ValueError):
    """The loss of a mini-batch is not determined by the losses of its parts."""


class LossKind(NamedTuple):
    """How a loss is combined.

    Attributes:
        name: one of :data:`KINDS`.
        observed: whether a mean or a sum is seen when the loss is computed; None where that is tried.
    """

    name: str
    observed: bool | None = None


Kinds = dict[bool, LossKind | None]
"""How a loss is combined, without and with a number of items among the inputs; None: it cannot be."""


class OwnLoss:
    """How the losses of micro-batches are combined that a model computes itself. Copies of its layers share it.

    Args:
        model: the name of the model's class, for errors.
        has_ending: whether the pipe itself returns the loss of all rows.
        reason: why losses are not combined where they cannot be.
    """

    def __init__(self, model: str, kinds: Kinds, *, has_ending: bool = True, reason: str = NEITHER) -> None:
        self._model, self._kinds, self._has_ending, self._reason = model, kinds, has_ending, reason

    def __deepcopy__(self, memo: object) -> OwnLoss:
        return self

    def part(self, output: Callable[[], Any], *, counted: bool) -> Any:
        """The loss of a micro-batch, for :class:`MiniBatchLoss`; the whole output if that has none.

        ``counted`` says whether a number of items is among the inputs.
        """
        kind = self._kinds[counted]
        if kind is None:
            raise self._refused(self._reason)
        with Reductions() as seen:
            found = output()
        if not has_own_loss(found):  # which the caller reports
            return found
        if kind.observed not in (None, seen.any()):
            raise self._refused(
                "it is computed in another way than with the sample, as where no label of a micro-batch counts, or "
                "after the loss was replaced (make a new pipe)"
            )
        by_counts = kind.name == "counts"
        if by_counts and seen.means and seen.sums:
            raise self._refused("a part of it is a mean, and another a sum")
        counts = [mean.divisor for mean in seen.means] if by_counts and seen.means else None
        return {"loss": own_loss(found), "counts": counts, "adds": kind.name == "sum" or (by_counts and seen.sums > 0)}

    def whole(self) -> MiniBatchLoss:
        if not any(self._kinds.values()):
            raise self._refused(self._reason)
        return MiniBatchLoss(self._refused)

    def expect_counts(self) -> None:
        """Raise :class:`CombineError` if losses are weighted by samples, of which each has other numbers of rows."""
        if any(kind is not None and kind.name != "sum" and not kind.observed for kind in self._kinds.values()):
            raise self._refused("it is a mean by hand, and tensors have other numbers of rows for each sample")

    def of_parts(self) -> CombineError:
        """The error for a call whose outputs are the losses of several micro-batches."""
        return self._refused(self._reason if self._kinds[False] is None else "a pipe with pick= has no other output")

    def _refused(self, reason: str) -> CombineError:
        whole = (
            "call pipe(**batch), whose output has the loss of all rows (in one process, train by its backward()), or "
            if self._has_ending
            else ""
        )
        return CombineError(
            f"{self._model} computes a loss that cannot be put together from those of micro-batches: {reason}; {whole}"
            "give step() and evaluate() a loss_fn of what the loss is computed from: "
            'GPipe(model, sample=sample, pick="logits"), or another part of the output'
        )


def with_whole_count(inputs: Any) -> Any:
    """``inputs`` with a number of items that every micro-batch gets as a whole."""
    found, others = split_loss_only(inputs)
    if not found:
        return inputs
    # Not a constant: every new one would be kept with the layers.
    whole = {name: Replicate(torch.as_tensor(value)) for name, value in found.items() if value is not None}
    if isinstance(others, Arguments):
        return Arguments(others.args, {**others.kwargs, **whole})
    return {**others, **whole}
