"""The loss function of a check, the caller's or a substitute, and the test that it is a mean over rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from microbatch import Batch

from ..engine._loss_value import LossFunction, loss_value, own_loss
from ..module._training import takes_output_alone
from ._findings import Finding
from ._rows import difference
from ._runs import figure


class Loss:
    """Calls ``loss_fn`` as :meth:`gpipe.GPipe.step` does.

    Args:
        loss_fn: without one, the loss in the model's output if there is one, else :func:`mean_square`.
        target: what ``loss_fn`` takes beside the output, or None.

    Raises:
        TypeError: ``loss_fn`` is not callable, or there is a target that it does not take.
    """

    def __init__(self, loss_fn: LossFunction | None, target: Any) -> None:
        self._loss_fn: LossFunction = loss_fn or _own_or_mean_square
        self._alone = takes_output_alone(loss_fn, target)

    def __call__(self, output: Any, target: Any) -> Any:
        return self._loss_fn(output) if self._alone else self._loss_fn(output, target)

    def parts(self, output: Any, target: Any, rows: int) -> tuple[Tensor, Any]:
        """The loss as a sum and a count, whose quotient is the mean.

        The count is ``rows`` if the loss function returns a mean without a count.
        """
        loss = loss_value(self(output, target))
        return (loss.total * rows, rows) if loss.count is None else (loss.total, loss.count)


def _own_or_mean_square(output: Any) -> Tensor:
    """The loss in the model's output if there is one, else the mean square of the output."""
    try:
        loss: Tensor = own_loss(output)
    except TypeError:
        loss = mean_square(output)
    return loss


def mean_square(output: Any) -> Tensor:
    """The sum of the mean squares of all floating-point outputs: a loss where the caller has given none."""
    squares = [tensor.square().mean() for tensor in Batch(output) if tensor.is_floating_point()]
    return sum(squares, torch.zeros(()))


def uneven(
    loss: Loss, whole: tuple[Any, Any, int], parts: Sequence[tuple[Any, Any, int]], tolerance: float
) -> Iterator[Finding]:
    """Check that the loss of the mini-batch is the mean of the losses of its micro-batches, weighted by rows.

    Args:
        loss: the loss function.
        whole: output, target and number of rows of the mini-batch.
        parts: the same of each micro-batch.
        tolerance: the largest relative difference that counts as rounding.

    Yields:
        A finding if the loss does not require grad, and one if the two losses differ.
    """
    total, count = loss.parts(*whole)
    if not total.requires_grad:
        yield Finding("untrained", None, "", "the loss does not require grad: nothing can be trained by it")
    with torch.no_grad():
        losses = [loss.parts(*part) for part in parts]
    found = sum(part for part, _ in losses) / sum(number for _, number in losses)
    apart = difference([total / count], [found])
    if apart > tolerance:
        message = "the loss of the mini-batch is not the mean of those of its micro-batches, by rows"
        yield Finding("loss", None, "", message, f"differs by {figure(apart)}")
