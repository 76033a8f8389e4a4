"""The loss of a check: that of the user, or a stand-in; and whether it is a plain mean over rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from microbatch import Batch

from ._findings import Finding
from ._rows import difference
from ._runs import figure


class Loss:
    """``loss_fn``, or without one the mean square of all outputs; called as :meth:`gpipe.GPipe.step` calls it."""

    def __init__(self, loss_fn: Callable[..., Any] | None) -> None:
        self._loss_fn = loss_fn

    def __call__(self, output: Any, target: Any) -> Any:
        return _mean_square(output) if self._loss_fn is None else self._loss_fn(output, target)

    def parts(self, output: Any, target: Any, rows: int) -> tuple[Tensor, Any]:
        """The loss as a sum and what it counts, which is ``rows`` if it does not say."""
        loss = self(output, target)
        return (loss[0], loss[1]) if isinstance(loss, tuple) else (loss * rows, rows)


def _mean_square(output: Any) -> Tensor:
    squares = [tensor.square().mean() for tensor in Batch(output) if tensor.is_floating_point()]
    return torch.stack(squares).sum()


def uneven(
    loss: Loss, whole: tuple[Any, Any, int], parts: Sequence[tuple[Any, Any, int]], tolerance: float
) -> Iterator[Finding]:
    """A finding if the loss of the whole is not the mean of those of micro-batches.

    Args:
        whole: output, target and rows of the mini-batch.
        parts: the same of each micro-batch.
    """
    with torch.no_grad():
        total, count = loss.parts(*whole)
        losses = [loss.parts(*part) for part in parts]
    found = sum(part for part, _ in losses) / sum(number for _, number in losses)
    apart = difference([total / count], [found])
    if apart > tolerance:
        message = "the loss of the mini-batch is not the mean of those of its micro-batches, by rows"
        yield Finding("loss", None, "", message, f"differs by {figure(apart)}")
