"""By what the losses of micro-batches are weighted, where that is seen while they are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._loss_value import LossFunction, loss_value, own_loss
from ._reductions import Reductions, known


class MiniBatchLoss:
    """Weighs the losses of micro-batches, as a loss function that returns a loss, or ``(sum, count)``.

    Counts on accelerators stay there. They are divided by the number that the first micro-batch makes expect of all, so
    that gradients in half precision are as large as those of a mean. ``refused`` makes the error for other losses.
    """

    def __init__(self, refused: Callable[[str], ValueError]) -> None:
        self._refused = refused
        self._form: tuple[bool, int] | None = None
        self._unit: Any = None
        self._sums: list[Any] = []

    def __call__(self, output: Any, share: float) -> Any:
        """The loss of a micro-batch that has this ``share`` of all rows, of an output of :meth:`OwnLoss.part`."""
        loss = own_loss(output)
        counts, adds = output["counts"], output["adds"]
        form = adds, 0 if counts is None else len(counts)
        if self._form not in (None, form):
            raise self._refused("it has other means, or sums, in some micro-batches than in others")
        self._form = form
        if counts is None:
            return loss if adds else loss * share
        return self.weighted(loss, counts, share)

    def weighted(self, loss: Tensor, counts: Sequence[Any], share: float) -> tuple[Tensor, Any]:
        """``loss``, whose means divide by ``counts``, as a sum and a count."""
        weight = self._weight(self._common(counts), share)
        return loss * weight, weight

    def _weight(self, count: Any, share: float) -> Any:
        if self._unit is None:
            self._unit = (count.clamp(min=1.0) if isinstance(count, Tensor) else max(count, 1.0)) / max(share, 1e-3)
        weight = count / self._unit
        # Where as much counts in all rows, nothing has to be scaled when the weights of all are known.
        is_share = not isinstance(weight, Tensor) and math.isclose(weight, share, rel_tol=1e-12)
        return share if is_share else weight

    def _common(self, counts: Sequence[Any]) -> Any:
        """The count of all means. It is right for all if their counts are in the same proportion everywhere."""
        first, *others = counts
        if not others:
            return first
        before = self._sums or [0.0] * len(counts)
        self._sums = [earlier + count for earlier, count in zip(before, counts, strict=True)]
        off: Any = False
        for count, earlier in zip(others, before[1:], strict=True):
            off = off | ((count == 0) != (first == 0))
            off = off | (abs(count * before[0] - first * earlier) > 1e-5 * first * earlier)
        if isinstance(off, Tensor):
            return torch.where(off, torch.nan, first)
        if off:
            raise self._refused("it is made of several means, whose counts differ in proportion in this mini-batch")
        return first


class ObservedLoss:
    """A loss function that may return a mean over anything, such as the labels that count.

    A mean of :mod:`torch.nn.functional` over labels that count is weighted by their number, if it is returned as it is
    or times a number; all else by rows. That is wrong for a loss that is made of means over other numbers, if these are
    not in proportion to the rows. Such a loss is refused; on an accelerator, which is not waited for, it is nan.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._whole = MiniBatchLoss(ValueError)
        self._first: tuple[list[Any], list[Any], float] | None = None

    def __call__(self, output: Any, *arguments: Any) -> Any:
        """What the function returns for all ``arguments`` but the last, which is the share of all rows."""
        *own, share = arguments
        with Reductions() as seen:
            found = self._loss_fn(output, *own)
        loss, count, metrics = loss_value(found)
        if count is not None:
            return found
        value: tuple[Any, ...]
        divisors = [mean.divisor for mean in seen.means]
        is_one = len(divisors) == 1 and any(loss is each for each in seen.means[0].results)
        if is_one and seen.means[0].counts:
            off = self._is_off((), seen.means[0].factors, share)
            value = self._whole.weighted(loss, divisors, share)
        else:
            off = self._is_off([*divisors, *seen.counted], (), share)
            value = (_nan_over_nothing(loss, divisors),)
        if isinstance(off, Tensor):
            value = value[0].masked_fill(off, torch.nan), *value[1:]
        elif off:
            raise ValueError(_MADE_OF_MEANS)
        value = value if metrics is None else (*value, metrics)
        return value if len(value) > 1 else value[0]

    def _is_off(self, divisors: Iterable[Any], factors: Iterable[Any], share: float) -> Any:
        """Whether ``divisors`` are not in proportion to this ``share`` of the rows, or ``factors`` are no constants."""
        now = [*map(known, divisors)], [*map(known, factors)], share
        self._first = self._first or now
        off: Any = any(len(a) != len(b) for a, b in zip(self._first[:2], now[:2], strict=True))
        for a, b in zip(self._first[0], now[0], strict=False):
            off = off | _differ(a * share, b * self._first[2])
        for a, b in zip(self._first[1], now[1], strict=False):
            off = off | _differ(a, b)
        return off


_MADE_OF_MEANS = (
    "loss_fn makes its loss of a mean over another number than rows, such as that of labels that count, which is not "
    "in proportion to the rows of micro-batches: their losses do not determine that of the mini-batch; return the "
    "sum and the count, as in (F.cross_entropy(..., reduction='sum'), (target != -100).sum()), the mean itself, or "
    "(loss * n, n) for a mean over n rows"
)


def _nan_over_nothing(loss: Tensor, divisors: Iterable[Any]) -> Tensor:
    """``loss``, which is nan if a mean in it is over nothing, as in the plain model; its gradients are the same."""
    for divisor in divisors:
        if isinstance(divisor, Tensor):
            loss = loss + torch.zeros_like(loss).masked_fill(divisor == 0, torch.nan)
        elif not divisor:
            loss = loss + torch.nan
    return loss


def _differ(a: Any, b: Any) -> Any:
    return abs(a - b) > 1e-6 * abs(a)
