"""The loss of the planned steps: computed for each micro-batch, or once, on the outputs of all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Batch
from profiler.sandbox import copied

from ..engine._loss_value import LossFunction, LossValue, loss_value
from ..module._keywords import NOTHING, Call
from ..module._rule import SeenSums, of_model_under, rule_of, unlike
from ..module._training import takes_output_alone

WAITING = ("fill_drain",)
"""Of the schedules that are searched, those under which no backward begins before the last forward has ended."""


def waiting(schedules: Sequence[str]) -> list[str]:
    """Those of the ``schedules`` under which the loss can be computed once, on the outputs of all rows."""
    return [name for name in schedules if name in WAITING]


@dataclass(frozen=True)
class StepLoss:
    """The loss of the planned steps, as the caller describes it.

    Attributes:
        loss_fn: of an output, and of the target if there is one; None if the model computes the loss, or none is known.
        reduction: how the losses of micro-batches are combined; None if the caller does not say it.
        target: of the mini-batch.
        own: the name of the model if it computes the loss itself.
    """

    loss_fn: LossFunction | None = None
    reduction: str | None = None
    target: Any = None
    own: str | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of a step. Without a loss, all outputs are added up.

        Of a module it is a copy, which may have a state and parameters of its own.
        """
        if self.loss_fn is None and self.own is None:
            return {"loss_fn": total, "reduction": "sum"}
        return {"loss_fn": fresh(self.loss_fn), "reduction": self.reduction}

    def without_data(self, *, whole: bool) -> dict[str, Any]:
        """The arguments of a step on tensors without data, where it cannot be tried out whether losses add up."""
        found = self.arguments()
        return {**found, "reduction": found["reduction"] or "sum"} if self.own and not whole else found

    def is_whole(self, batches: Sequence[Batch], *, returns_sums: bool) -> bool:
        """Whether a step of layers computes the loss once: it is not known how the losses of micro-batches add up.

        Args:
            batches: the parts of the mini-batch.
            returns_sums: whether ``loss_fn`` was seen to return a :class:`gpipe.LossSum`.
        """
        if self.loss_fn is None:
            return False
        sums = returns_sums or self.loss_fn in SeenSums()
        return rule_of(self._call, batches, None, returns_sums=sums, adds=False) is None

    def watched(self, tell: Callable[[LossValue], None]) -> nn.Module | None:
        """The loss function as a profile calls it; None if there is none. ``tell`` is called with what it returns."""
        if self.loss_fn is None:
            return None
        return _Watched(fresh(self.loss_fn), takes_output_alone(self.loss_fn, self.target), tell)

    def refused(self, schedule: str) -> ValueError:
        """The error for a loss of all rows under a schedule that cannot wait for it."""
        if self.own is not None:
            return of_model_under(self.own, schedule)
        return unlike(self._call, schedule)(LossValue(torch.zeros(()), None, None))

    def note(self, *, whole: bool) -> str:
        """For the reader of a plan: which kind of loss it is made for."""
        if whole:
            return (
                "the loss is computed once, on the outputs of all rows, since it is not known how the losses of "
                f"micro-batches add up: only {', '.join(WAITING)} can wait for it"
            )
        if self.loss_fn is None and self.own is None:
            return "no loss_fn was given: the loss counts as free, and as computed for each micro-batch"
        return "the loss is computed for each micro-batch, as it is known how they add up"

    @property
    def _call(self) -> Call:
        return Call("step", NOTHING, self.target, {}, self.loss_fn, self.reduction, None, False)


def read_loss(loss_fn: LossFunction | None, reduction: str | None, target: Any) -> StepLoss:
    """The loss of a plan; TypeError or ValueError, as of a step, if its arguments do not fit."""
    takes_output_alone(loss_fn, target)
    found = StepLoss(loss_fn, reduction, target)
    found._call.divisor  # noqa: B018 — checks the reduction
    return found


class _Watched(nn.Module):
    """A loss function that is called with a target even if it takes the output alone, and returns a scalar."""

    def __init__(self, loss_fn: LossFunction, alone: bool, tell: Callable[[LossValue], None]) -> None:
        super().__init__()
        self.loss_fn, self._alone = loss_fn, alone
        self._tell = tell

    def forward(self, output: Any, target: Any) -> Tensor:
        value = loss_value(self.loss_fn(output) if self._alone else self.loss_fn(output, target))
        self._tell(value)
        return value.total


def fresh(loss_fn: LossFunction | None) -> Any:
    """``loss_fn`` for some steps; of a module a copy."""
    return copied(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn


def total(output: Any, _: Any) -> Tensor:
    """A loss for a model whose own is not known; ValueError if no output requires a gradient."""
    parts = [tensor.float().sum() for tensor in Batch(output) if tensor.requires_grad]
    if not parts:
        raise ValueError(
            "no tensor of the output requires grad, so that there is nothing to train; plan(..., calibrate=False) "
            "plans for what is there"
        )
    return torch.stack(parts).sum()
