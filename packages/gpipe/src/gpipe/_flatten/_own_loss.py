"""The loss of a mini-batch, from what a model that computes its own loss gives for each micro-batch.

The loss of a model may be a mean over its rows, a mean over what counts in them, such as all labels but those of -100,
or a sum that is divided by a number that the caller gives. Which one it is was tried when the model was flattened
(:mod:`gpipe._flatten._probe`). Micro-batches are combined by that, so that their loss is the model's own for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from microbatch import Arguments, Replicate

from ..engine._loss_value import own_loss
from ..engine._settings import settings, with_settings
from ._ending import split_loss_only
from ._reductions import Reductions

KINDS = ("counts", "rows", "sum")
"""How losses of parts are combined: weighted by what their means divide by, where :class:`Reductions` sees means, added
where it sees sums, else weighted by rows; always weighted by rows; always added."""


_NEITHER = "it is neither a mean over rows or over labels that count, nor a sum"


class CombineError(ValueError):
    """The loss of a mini-batch is not determined by the losses of its parts."""


class OwnLoss:
    """How the losses of micro-batches are combined that a model computes itself. Copies of its layers share it.

    Args:
        model: the name of the model's class, for errors.
        kinds: one of :data:`KINDS`, without and with a number of items among the inputs; None: none of them is right.
        observed: whether a mean or a sum was seen in the trial, without and with a number of items; None for a trial.
        has_ending: whether the pipe itself returns the loss of all rows.
    """

    def __init__(
        self,
        model: str,
        kinds: dict[bool, str | None],
        observed: dict[bool, bool] | None = None,
        *,
        has_ending: bool = True,
    ) -> None:
        self._model, self.kinds, self._observed, self._has_ending = model, kinds, observed, has_ending

    def __deepcopy__(self, memo: object) -> OwnLoss:
        return self

    def wanted(self) -> AbstractContextManager[None]:
        """A context in which the last layer returns what :class:`MiniBatchLoss` takes, in place of its output."""
        return with_settings(wanted=self)

    @property
    def is_wanted(self) -> bool:
        return settings().wanted is self

    def expect_combined(self) -> None:
        """Raise CombineError if no micro-batches can be combined."""
        if not any(self.kinds.values()):
            raise self._refused(_NEITHER)

    def part(self, output: Callable[[], Any], *, counted: bool) -> Any:
        """The loss of a micro-batch, for :class:`MiniBatchLoss`; the whole output if that has none.

        Args:
            output: computes the output of the model.
            counted: whether a number of items is among the inputs.
        """
        kind = self.kinds[counted]
        if kind is None:
            raise self._refused(_NEITHER)
        with Reductions() as seen:
            found = output()
        if self._observed is not None and self._observed[counted] != seen.any():
            raise self._refused("it is computed in another way than when the model was flattened: make a new pipe")
        if kind == "counts" and seen.counts and seen.sums:
            raise self._refused("a part of it is a mean, and another a sum")
        return part_of(found, kind, seen)

    def whole(self) -> MiniBatchLoss:
        """The loss function of a run."""
        return MiniBatchLoss(self._refused)

    def _refused(self, reason: str) -> CombineError:
        whole = "call pipe(**batch), which returns the loss of all rows, or " if self._has_ending else ""
        return CombineError(
            f"{self._model} computes a loss that cannot be put together from those of micro-batches: {reason}; {whole}"
            "give step() and evaluate() a loss_fn of what the loss is computed from: "
            'GPipe(model, sample=sample, pick="logits")'
        )


def part_of(output: Any, kind: str, seen: Reductions) -> Any:
    """The loss in ``output`` and what it is weighted by; ``output`` if it has none, as the caller then reports."""
    try:
        loss = own_loss(output)
    except TypeError:
        return output
    observed = kind == "counts"
    counts = torch.stack(seen.counts) if observed and seen.counts else None
    return {"loss": loss, "counts": counts, "adds": kind == "sum" or (observed and seen.sums > 0)}


class MiniBatchLoss:
    """Weighs the losses of micro-batches, as a loss function that returns a loss, or ``(sum, count)``.

    Counts stay on their device. They are divided by the number that the first micro-batch makes expect of all, so that
    gradients in half precision are as large as those of a mean.

    Args:
        refused: makes the error for a loss that cannot be combined.
    """

    def __init__(self, refused: Callable[[str], ValueError]) -> None:
        self._refused = refused
        self._form: tuple[bool, int] | None = None
        self._unit: Tensor | None = None
        self._sums: Tensor | None = None

    def __call__(self, output: Any, share: float) -> Any:
        """The loss of a micro-batch that has this ``share`` of all rows.

        Args:
            output: what :func:`part_of` returned.
        """
        loss = own_loss(output)
        counts, adds = output["counts"], output["adds"]
        form = adds, 0 if counts is None else len(counts)
        if self._form not in (None, form):
            raise self._refused("it has other means, or sums, in some micro-batches than in others")
        self._form = form
        if counts is None:
            return loss if adds else loss * share
        if self._unit is None:
            self._unit = counts[0].clamp(min=1.0) / max(share, 1e-3)
        weight = self._common(counts) / self._unit
        return loss * weight, weight

    def _common(self, counts: Tensor) -> Tensor:
        """The count of all means. It is right for all if their counts are in the same proportion everywhere."""
        if len(counts) == 1:
            return counts[0]
        before = torch.zeros_like(counts) if self._sums is None else self._sums
        self._sums = before + counts
        off = (counts * before[0] - counts[0] * before).abs() > 1e-5 * counts[0] * before
        fits = ~off.any() & (counts.gt(0).all() | counts.eq(0).all())
        if counts.device.type != "cpu":  # reading it would wait for the device
            return counts[0].where(fits, torch.nan)
        if not fits:
            raise self._refused("it is made of several means, whose counts differ in proportion in this mini-batch")
        return counts[0]


def with_whole_count(inputs: Any) -> Any:
    """``inputs`` with a number of items as a tensor that every micro-batch gets as a whole."""
    found, others = split_loss_only(inputs)
    if not found:
        return inputs
    whole = {name: Replicate(_tensor(value)) for name, value in found.items() if value is not None}
    if isinstance(others, Arguments):
        return Arguments(others.args, {**others.kwargs, **whole})
    return {**others, **whole}


def _tensor(value: Any) -> Any:
    if not isinstance(value, Number):
        return value
    # Not a constant: every new one would be kept with the layers.
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float32)
