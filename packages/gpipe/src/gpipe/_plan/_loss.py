"""The loss of the planned steps: computed per micro-batch, or once, on the outputs of the full mini-batch."""

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
from ..module._rule import SeenSums, find_rule, of_model_under, unlike
from ..module._training import takes_output_alone
from ._arguments import WAITING


def waiting(schedules: Sequence[str]) -> list[str]:
    """Return the ``schedules`` that can compute the loss once, on the outputs of the full mini-batch."""
    return [name for name in schedules if name in WAITING]


@dataclass(frozen=True)
class StepLoss:
    """The loss of the planned steps, as specified by the caller.

    Attributes:
        loss_fn: a function of an output, and of the target if there is one; None if the model computes the loss, or no
            loss is known.
        reduction: how to combine the losses of micro-batches; None if not specified.
        target: the target of the mini-batch.
        own: the class name of the model if it computes the loss itself.
    """

    loss_fn: LossFunction | None = None
    reduction: str | None = None
    target: Any = None
    own: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a step. Without a loss, the sum of all outputs is used.

        If ``loss_fn`` is a module, it is copied, since it may have state and parameters.
        """
        if self.loss_fn is None and self.own is None:
            return {"loss_fn": total, "reduction": "sum"}
        return {"loss_fn": fresh(self.loss_fn), "reduction": self.reduction}

    def without_data(self, *, whole: bool) -> dict[str, Any]:
        """Return the arguments of a step on fake tensors, which cannot show whether losses add up."""
        found = self.arguments()
        return {**found, "reduction": found["reduction"] or "sum"} if self.own and not whole else found

    def is_whole(self, batches: Sequence[Batch], *, returns_sums: bool) -> bool:
        """Return whether a step computes the loss once, because it is not known how micro-batch losses add up.

        Args:
            batches: the micro-batches.
            returns_sums: whether ``loss_fn`` has returned a :class:`gpipe.LossSum`.
        """
        if self.loss_fn is None:
            return False
        sums = returns_sums or self.loss_fn in SeenSums()
        return find_rule(self._call, batches, None, returns_sums=sums, adds=False) is None

    def watch(self, tell: Callable[[LossValue], None]) -> nn.Module | None:
        """Return the loss function to profile, or None. It passes each loss value to ``tell``."""
        if self.loss_fn is None:
            return None
        return _Watched(fresh(self.loss_fn), takes_output_alone(self.loss_fn, self.target), tell)

    def build_error(self, schedule: str) -> ValueError:
        """Return the error for a loss of the full mini-batch under a schedule that cannot wait for it."""
        if self.own is not None:
            return of_model_under(self.own, schedule)
        return unlike(self._call, schedule)(LossValue(torch.zeros(()), None, None))

    def note(self, schedule: str, *, whole: bool) -> str:
        """Return a note for a plan with this schedule that says how the loss is computed."""
        if whole:
            return (
                "the loss is computed once, on the outputs of the full mini-batch, since it is not known how the "
                f"losses of micro-batches add up; only {schedule} can wait for it"
            )
        if self.loss_fn is None and self.own is None:
            return "no loss_fn was given: the loss counts as free, and as computed per micro-batch"
        return "the loss is computed per micro-batch, since it is known how the losses add up"

    @property
    def _call(self) -> Call:
        return Call("step", NOTHING, self.target, {}, self.loss_fn, self.reduction, None, False)


def read_loss(loss_fn: LossFunction | None, reduction: str | None, target: Any) -> StepLoss:
    """Return the loss of a plan. Raise the same errors as a step if its arguments are invalid."""
    takes_output_alone(loss_fn, target)
    found = StepLoss(loss_fn, reduction, target)
    found._call.divisor  # noqa: B018 — checks the reduction
    return found


class _Watched(nn.Module):
    """A loss function of output and target that returns a scalar, even if ``loss_fn`` takes only the output."""

    def __init__(self, loss_fn: LossFunction, alone: bool, tell: Callable[[LossValue], None]) -> None:
        super().__init__()
        self.loss_fn, self._alone = loss_fn, alone
        self._tell = tell

    def forward(self, output: Any, target: Any) -> Tensor:
        value = loss_value(self.loss_fn(output) if self._alone else self.loss_fn(output, target))
        self._tell(value)
        return value.total


def fresh(loss_fn: LossFunction | None) -> Any:
    """Return ``loss_fn``; a copy if it is a module."""
    return copied(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn


def total(output: Any, _: Any) -> Tensor:
    """Return the sum of all outputs, the loss if none is known; ValueError if no output requires a gradient."""
    parts = [tensor.float().sum() for tensor in Batch(output) if tensor.requires_grad]
    if not parts:
        raise ValueError(
            "no tensor of the output requires grad, so there is nothing to train; to plan anyway, pass calibrate=False"
        )
    return torch.stack(parts).sum()
