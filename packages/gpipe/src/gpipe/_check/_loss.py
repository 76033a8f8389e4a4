"""The loss of a check: that of the user, or a stand-in; and whether it is a plain mean over rows."""

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
    """``loss_fn``, called as :meth:`gpipe.GPipe.step` calls it; without one the model's own loss, else a stand-in.

    Raises:
        TypeError: it is no function, or takes no ``target``, but there is one.
    """

    def __init__(self, loss_fn: LossFunction | None, target: Any) -> None:
        self._loss_fn: LossFunction = loss_fn or _own_or_mean_square
        self._alone = takes_output_alone(loss_fn, target)

    def __call__(self, output: Any, target: Any) -> Any:
        return self._loss_fn(output) if self._alone else self._loss_fn(output, target)

    def parts(self, output: Any, target: Any, rows: int) -> tuple[Tensor, Any]:
        """The loss as a sum and what it counts, which is ``rows`` if it does not say."""
        loss = loss_value(self(output, target))
        return (loss.total * rows, rows) if loss.count is None else (loss.total, loss.count)


def _own_or_mean_square(output: Any) -> Tensor:
    """The loss that the model has computed, if it has; else one of all floating-point outputs."""
    try:
        loss: Tensor = own_loss(output)
    except TypeError:
        loss = mean_square(output)
    return loss


def mean_square(output: Any) -> Tensor:
    """The mean square of each floating-point output, summed up: a loss where nobody has given one."""
    squares = [tensor.square().mean() for tensor in Batch(output) if tensor.is_floating_point()]
    return sum(squares, torch.zeros(()))


def uneven(
    loss: Loss, whole: tuple[Any, Any, int], parts: Sequence[tuple[Any, Any, int]], tolerance: float
) -> Iterator[Finding]:
    """A finding if nothing is trained by the loss, or that of the whole is not the mean of those of micro-batches.

    Args:
        whole: output, target and rows of the mini-batch.
        parts: the same of each micro-batch.
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
