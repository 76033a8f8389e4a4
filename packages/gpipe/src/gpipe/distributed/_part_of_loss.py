"""The part of a micro-batch in the loss of the mini-batch, for torch's pipelining runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..module._keywords import Call
from ..module._rule import rule_of
from ..module._torch_losses import is_of_torch
from ._processes import Rows

LossFunction = Callable[..., Any]


class PartOfLoss:
    """A loss function whose values for all micro-batches, taken in order, add up to the loss of the mini-batch.

    Args:
        loss_fn: takes the output and the target of a micro-batch.
        chunks: the number of micro-batches, which have as many rows each.
        reduction: how ``loss_fn`` reduces rows; None if it is one of torch's losses.

    Raises:
        ValueError: it is not known how the losses of micro-batches add up.
    """

    def __init__(self, loss_fn: LossFunction, chunks: int, reduction: str | None) -> None:
        self._loss_fn, self._chunks, self._reduction = loss_fn, chunks, reduction
        self._parts: list[LossFunction] = []
        self._next = iter(self._parts)
        if reduction not in (None, "mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', or left out; got {reduction!r}")
        if reduction is None and not is_of_torch(loss_fn):
            raise _unknown("")

    def begin(self, target: Any, options: Mapping[str, Any]) -> None:
        """Begin a step with the ``target`` of the mini-batch, and ``options`` of the loss function."""
        rows = Rows((len(target) // self._chunks if isinstance(target, Tensor) else 1,))
        loss_fn = partial(self._loss_fn, **options) if options else self._loss_fn
        call = Call("step", None, target, {}, loss_fn, self._reduction, None, False)
        rule = rule_of(call, [rows] * self._chunks, None, returns_sums=False, adds=False)
        if rule is None or rule.weights is None:
            raise _unknown(" of this target")
        more = rule.more or [()] * self._chunks
        self._parts = [_part(rule.loss_fn, *own) for own in zip(more, rule.weights, strict=True)]
        self.rewind()

    def rewind(self) -> None:
        """Return to the first micro-batch, of which torch computes a loss to find out shapes."""
        self._next = iter(self._parts)

    def __call__(self, output: Any, target: Any, **_: Any) -> Tensor:
        found: Tensor = next(self._next)(output, target)
        return found


def _part(loss_fn: LossFunction, more: tuple[Any, ...], weight: Any) -> LossFunction:
    def part(output: Any, target: Any) -> Tensor:
        loss = loss_fn(output, target, *more)
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"loss_fn: torch's pipelining runtime takes a tensor; got {type(loss).__name__}. A gpipe.LossSum, and "
                "metrics, work in gpipe.distributed.Rank"
            )
        found: Tensor = loss * weight
        return found

    return part


def _unknown(why: str) -> ValueError:
    return ValueError(
        f"loss_fn: it is not known how the losses of micro-batches{why} add up, and torch's pipelining runtime "
        'computes one for each; say that it is a mean over rows, or a sum: reduction="mean" or "sum"; or give one of '
        "torch's losses itself, such as F.cross_entropy; or use gpipe.distributed.Rank, which computes any loss once, "
        "of all rows"
    )
