"""The loss of a check, the caller's or a substitute, and the test that it is a mean over rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Batch

from ..engine._loss_value import LossFunction, loss_value, own_loss
from ..engine._weights import ObservedLoss
from ..module._training import takes_output_alone
from ._findings import Finding
from ._rows import ROUNDING, difference, figure
from ._trial import seeded

LossPart = tuple[Any, Any, int]
"""A mini-batch or micro-batch: what the model gives, the target, and the number of rows."""


class Loss:
    """Calls ``loss_fn`` as :meth:`gpipe.GPipe.step` does.

    Without a ``loss_fn``, this is the loss in the model's output if there is one, else :func:`mean_square`.
    """

    def __init__(self, loss_fn: LossFunction | None, target: Any) -> None:
        self._alone = takes_output_alone(loss_fn, target)
        self._loss_fn = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn

    def __call__(self, output: Any, target: Any) -> Any:
        if self._loss_fn is None:
            return own_loss(output) if self.is_own(output) else mean_square(output)
        return self._loss_fn(output) if self._alone else self._loss_fn(output, target)

    def to(self, dtype: torch.dtype) -> None:
        if isinstance(self._loss_fn, nn.Module):
            self._loss_fn.to(dtype)

    def is_own(self, output: Any) -> bool:
        """Whether the model has computed the loss."""
        with suppress(TypeError):
            return self._loss_fn is None and own_loss(output) is not None
        return False

    def of(self, parts: Sequence[LossPart]) -> Tensor:
        """The loss of a mini-batch that consists of ``parts``: the sum of their losses by the sum of their counts.

        The count is the number of rows if the loss function returns a mean without a count, over nothing else.
        """
        every = sum(rows for *_, rows in parts)
        observed = ObservedLoss(self)
        losses = [
            (loss_value(self(output, target) if rows == every else observed(output, target, rows / every)), rows)
            for output, target, rows in parts
        ]
        # A mean over rows becomes a sum before it is added up, as a pipe does it.
        totals = [loss.total * rows if loss.count is None else loss.total for loss, rows in losses]
        counts = [rows if loss.count is None else loss.count for loss, rows in losses]
        mean: Tensor = sum(totals[1:], totals[0]) / sum(counts)
        return mean


def mean_square(output: Any) -> Tensor:
    """The sum of the mean squares of all floating-point outputs."""
    squares = [tensor.square().mean() for tensor in Batch(output) if tensor.is_floating_point()]
    return sum(squares, torch.zeros(()))


def examine_loss(loss: Loss, whole: LossPart, parts: Sequence[LossPart], tolerance: float) -> Iterator[Finding]:
    """Check that the loss requires grad, and is the mean of those of its micro-batches."""
    with seeded(nn.Module()) as used:
        total = loss.of([whole])
    if not total.requires_grad:
        yield Finding("untrained", None, "", "the loss does not require grad: nothing can be trained by it")
    if used.drew and not used.impure:
        yield Finding("random", None, "", "the loss draws random numbers")
    elif used.impure or difference([total], [loss.of([whole])]) > tolerance:
        yield Finding("impure", None, "", f"the loss {used.impure or 'is another one each time'}")
    elif not loss.is_own(whole[0]):  # a pipe knows more of what a model computes itself, and is the judge of it
        try:
            apart = difference([total], [loss.of(parts)])
        except Exception as error:
            yield Finding("loss", None, "", "the loss fails on a micro-batch", f"{type(error).__name__}: {error}")
            return
        if apart > ROUNDING:
            message = "the loss of the mini-batch is not the mean of those of its micro-batches, by rows"
            yield Finding("loss", None, "", message, f"differs by {figure(apart)}")
