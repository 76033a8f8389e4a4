"""The loss used by a check (the caller's or a substitute), and a test that micro-batch losses add up as declared."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import Batch, unwrap

from ..engine._loss_value import LossFunction, loss_value, own_loss
from ..module._keywords import NOTHING, Call
from ..module._rule import Rule, SeenSums, compute_shares, find_rule
from ..module._training import takes_output_alone
from ._findings import Finding
from ._rows import ROUNDING, difference, figure
from ._trial import seeded

LossPart = tuple[Any, Any, int]
"""The output of the model, the target and the number of rows, for a mini-batch or micro-batch."""

ONCE = "once, on the outputs of all rows: how the losses of micro-batches add up is not known"
EACH = "for each micro-batch: how they add up is known"


class _Rows(NamedTuple):
    rows: tuple[int, ...]


class Loss:
    """A loss that calls ``loss_fn`` as :meth:`gpipe.GPipe.step` does.

    Without a ``loss_fn``, it is the loss in the model's output, if any, and otherwise :func:`mean_square`.

    Attributes:
        reduction: the caller's ``reduction``, or None.
        of_substitute: the reduction of :func:`mean_square`; None if it is computed once, on the full mini-batch.
    """

    of_substitute: str | None = "mean"

    def __init__(self, loss_fn: LossFunction | None, target: Any, reduction: str | None = None) -> None:
        self._alone = takes_output_alone(loss_fn, target)
        self.loss_fn = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        self.reduction, self._target = reduction, unwrap(target, root="target")[0]
        self._call("step").divisor  # noqa: B018 — checks the reduction

    def __call__(self, output: Any, target: Any) -> Any:
        if self.loss_fn is None:
            return own_loss(output) if self.is_own(output) else mean_square(output)
        return self.loss_fn(output) if self._alone else self.loss_fn(output, target)

    def to(self, dtype: torch.dtype) -> None:
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.to(dtype)

    def is_own(self, output: Any) -> bool:
        """Return whether the model has computed the loss."""
        with suppress(TypeError):
            return self.loss_fn is None and own_loss(output) is not None
        return False

    def of(self, output: Any, target: Any) -> Tensor:
        """Return the loss of a full mini-batch."""
        value = loss_value(self(output, target))
        return value.total if value.count is None else value.total / value.count

    def rule(self, whole: LossPart, rows: Sequence[int]) -> Rule | None:
        """Return how the losses of micro-batches with these numbers of ``rows`` add up; None if it is not known."""
        if self.loss_fn is None and not self.is_own(whole[0]):  # mean_square
            if self.of_substitute is None:
                return None
            return Rule(mean_square, compute_shares([_Rows((each,)) for each in rows]))
        sums = loss_value(self(*whole[:2])).count is not None or (
            self.loss_fn is not None and self.loss_fn in SeenSums()
        )
        batches = [_Rows((each,)) for each in rows]
        return find_rule(self._call("step"), batches, None, returns_sums=sums, adds=False)

    def of_parts(self, rule: Rule, parts: Sequence[LossPart]) -> Tensor:
        """Return the loss of a mini-batch that was split into ``parts``, combined by ``rule``."""
        totals, counts = list[Tensor](), list[Any]()
        for k, (output, target, _) in enumerate(parts):
            if rule.more is not None:
                value = loss_value(rule.loss_fn(output, target, *rule.more[k]))
            else:
                value = loss_value(self(output, target))
            if (value.count is None) != (rule.weights is not None):
                raise ValueError("loss_fn returned a LossSum for only some micro-batches, or despite reduction=")
            totals.append(value.total * (1.0 if rule.weights is None else rule.weights[k]))
            counts.append(value.count)
        found = torch.stack(totals).sum()
        return found if rule.weights is not None else found / sum(counts)

    def _call(self, method: str) -> Call:
        return Call(method, NOTHING, self._target, {}, self.loss_fn, self.reduction, None, False)


def mean_square(output: Any, _: Any = None) -> Tensor:
    """Return the sum of the mean squares of all floating-point outputs."""
    squares = [tensor.square().mean() for tensor in Batch(output) if tensor.is_floating_point()]
    return sum(squares, torch.zeros(()))


def examine_loss(loss: Loss, whole: LossPart, parts: Sequence[LossPart], tolerance: float) -> Iterator[Finding]:
    """Check that the loss requires grad, and that micro-batch losses add up to it as declared."""
    with seeded(nn.Module()) as used:
        total = loss.of(*whole[:2])
    if not total.requires_grad:
        yield Finding("untrained", None, "", "the loss does not require grad, so nothing can be trained")
    if used.drew and not used.impure:
        yield Finding("random", None, "", "the loss uses random numbers")
    elif used.impure or difference([total], [loss.of(*whole[:2])]) > tolerance:
        yield Finding("impure", None, "", f"the loss {used.impure or 'differs from call to call'}")
    elif not loss.is_own(whole[0]):  # examine_pipe compares the model's own loss
        rule = loss.rule(whole, [rows for *_, rows in parts])
        if rule is None:
            return
        try:
            deviation = difference([total], [loss.of_parts(rule, parts)])
        except Exception as error:
            yield Finding("loss", None, "", "the loss fails on a micro-batch", f"{type(error).__name__}: {error}")
            return
        if deviation > ROUNDING:
            said = "a LossSum" if rule.weights is None else f"reduction={loss.reduction or 'mean'!r}"
            message = f"the losses of micro-batches do not add up to the mini-batch's loss as {said} says"
            yield Finding("loss", None, "", message, f"differs by {figure(deviation)}")
