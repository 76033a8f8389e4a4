"""Determine how the losses of micro-batches add up to the loss of the mini-batch.

This is known if the caller passes ``reduction``, if ``loss_fn`` returns a :class:`gpipe.LossSum`, if it is one of
torch's losses, or if the model follows the convention of ``num_items_in_batch``. The code of a loss function is never
analyzed: any other loss is computed once, on the outputs of the full mini-batch.
"""

from __future__ import annotations

import inspect
import typing
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from microbatch import Mean, Sum

from ..engine._loss_value import LossFunction, LossSum, LossValue, own_loss
from ..schedule import Schedule
from ..schedule._named import BREADTH_FIRST
from ._keywords import Call
from ._torch_losses import torch_loss


class HasRows(Protocol):
    """A micro-batch, or a description of one that is in another process."""

    @property
    def rows(self) -> Sequence[int]:
        """The number of rows of each tensor."""


class Rule(NamedTuple):
    """A weighted sum of the losses of micro-batches.

    Attributes:
        loss_fn: called with the output and the target of each micro-batch.
        weights: the weight of each loss, a number or a tensor; None if ``loss_fn`` returns a :class:`LossSum`.
        more: the further arguments of ``loss_fn`` for each micro-batch.
    """

    loss_fn: LossFunction
    weights: Sequence[Any] | None
    more: Sequence[tuple[Any, ...]] | None = None


def find_rule(call: Call, batches: Sequence[HasRows], out_spec: Any, *, returns_sums: bool, adds: bool) -> Rule | None:
    """Return the rule for a call of ``step`` or ``evaluate``; None if it is not known how the losses add up.

    Args:
        batches: the micro-batches, with their numbers of rows.
        out_spec: the pipe's ``out_spec``; ``Mean`` and ``Sum`` determine how outputs that are losses add up.
        returns_sums: whether ``loss_fn`` is known to return a :class:`LossSum`.
        adds: whether the model computes its loss by the convention of ``num_items_in_batch``.
    """
    loss_fn = own_loss if call.loss_fn is None else call.loss_fn
    shares, divisor = compute_shares(batches), call.divisor
    found = torch_loss(loss_fn, call.target) if call.reduction != "sum" else None
    if found is not None and (sizes := _cut_alike(found[1].shape[found[0].dim], batches)):
        known, target = found
        if not known.is_over_labels(target):
            return Rule(known.of_rows, [1.0] * len(batches) if known.adds else shares)
        counts = known.counts(target, sizes)
        every = sum(counts)
        weights = [
            count / every.clamp(min=_LEAST) if isinstance(every, Tensor) else count / (every or 1) for count in counts
        ]
        return Rule(known.compute_mean, weights, [(count, every) for count in counts])
    if call.reduction is not None:
        return Rule(loss_fn, shares if call.reduction == "mean" else [1.0 / divisor] * len(batches))
    if call.loss_fn is None:
        if adds or isinstance(out_spec, Sum):
            return Rule(loss_fn, [1.0] * len(batches))
        return Rule(loss_fn, shares) if isinstance(out_spec, Mean) else None
    return Rule(loss_fn, None) if returns_sums else None


def compute_shares(batches: Sequence[HasRows]) -> list[float]:
    """Return each micro-batch's fraction of the rows of the mini-batch."""
    # The first tensor has one row per sample, even if others have several.
    rows = [batch.rows[0] for batch in batches]
    return [row / max(1, sum(rows)) for row in rows]


def _cut_alike(rows: int, batches: Sequence[HasRows]) -> tuple[int, ...]:
    """Return the sizes of the parts of a target of ``rows`` rows, if an input tensor has that many; else ``()``."""
    columns = zip(*[batch.rows for batch in batches], strict=True)
    return next((column for column in columns if sum(column) == rows), ())


def has_loss(schedule: Schedule | str | None) -> bool:
    return isinstance(schedule, Schedule) and schedule.has_loss


def is_left_open(schedule: Schedule | str | None) -> bool:
    """Return whether the caller lets the pipe choose the schedule of a step."""
    return schedule is None or (isinstance(schedule, str) and schedule.lower() in ("auto", "search"))


def choose_schedule_name(schedule: str | None, *, whole: bool, offloads: bool = False) -> str:
    """Return the name of the schedule: by default, the one with the lowest memory for this kind of loss.

    If parameters are on the host, it is the one that loads each stage twice.
    """
    if offloads and is_left_open(schedule):
        return BREADTH_FIRST
    if whole and is_left_open(schedule):
        return "fill_drain"
    return "1f1b" if schedule is None else schedule


def unlike(call: Call, schedule: Schedule | str | None) -> Callable[[LossValue], ValueError]:
    """Return a function that makes the error for a loss that contradicts its rule."""

    def error(value: LossValue) -> ValueError:
        if value.count is not None and call.reduction is None:
            return ValueError(
                "the last layer returned a LossSum, which conflicts with out_spec=; create the pipe without it"
            )
        if value.count is not None:
            return ValueError(
                f"loss_fn returned a LossSum, which conflicts with reduction={call.reduction!r}; return a scalar, or "
                "omit reduction= and normalizer="
            )
        if call.loss_fn is None:
            return ValueError(
                "the last layer returned the loss of a micro-batch, but it is not known how these losses add up; pass "
                'reduction="mean" for a mean over rows, or reduction="sum" for a sum, or return gpipe.LossSum(total, '
                "count)"
            )
        if schedule is None:
            return ValueError(
                "loss_fn returned a scalar, but is annotated to return a LossSum, or has returned one before; "
                f"{_WAYS}; or use a separate function for each kind"
            )
        return ValueError(
            "loss_fn returned a scalar, but it is not known how the losses of micro-batches add up, and "
            f"{_describe_schedule(schedule)} starts backwards before all forwards have finished; {_WAYS}; or omit "
            "schedule=, so that the loss is computed once, on the outputs of the full mini-batch"
        )

    return error


def of_model_under(model: str, schedule: Schedule | str | None) -> ValueError:
    """Return the error for a model's own loss with a schedule that cannot wait for the full mini-batch."""
    return ValueError(
        f"{model} computes a loss, but it is not known how the losses of micro-batches add up, and "
        f"{_describe_schedule(schedule)} starts backwards before all forwards have finished; omit schedule=, so that "
        'the loss is computed once, on the full mini-batch; or pass reduction="mean", or "sum" with '
        "num_items_in_batch=; or pass a loss_fn that returns gpipe.LossSum(total, count) for the part of the output "
        "that it needs"
    )


def _describe_schedule(schedule: Schedule | str | None) -> str:
    return f"schedule={schedule!r}" if isinstance(schedule, str) else "the schedule"


_WAYS = (
    'return gpipe.LossSum(total, count); or pass reduction="mean" for a mean over rows, or reduction="sum" for a sum; '
    "or pass one of torch's losses itself, such as F.cross_entropy"
)

OF_ALL_ROWS = (
    "the loss of step() is computed once, on the outputs of all micro-batches, because it is not known how their "
    f"losses add up: all outputs are kept until then. To start backwards earlier (1F1B): {_WAYS}"
)

OF_MODEL = (
    "the loss of step() is computed once, by the model, on the outputs of its blocks for all micro-batches, because it "
    "is not known how their losses add up: all activations are kept until then. To start backwards earlier (1F1B), use "
    'step(**batch, num_items_in_batch=count, reduction="sum") for a model that divides the sum of its losses by that '
    'number, or reduction="mean" for a mean over rows'
)

_LEAST = torch.finfo(torch.float32).tiny


class SeenSums:
    """The set of loss functions that have returned a :class:`LossSum`, or are annotated to return one."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()

    def add(self, loss_fn: LossFunction) -> None:
        owner, function = _identity(loss_fn)
        with suppress(TypeError):  # unhashable, or without weak references
            self._seen.setdefault(owner, set()).add(function)

    def __contains__(self, loss_fn: LossFunction) -> bool:
        owner, function = _identity(loss_fn)
        with suppress(TypeError):
            if function in self._seen.get(owner, ()):
                return True
        if not _says_so(loss_fn):
            return False
        self.add(loss_fn)
        return True


def _identity(loss_fn: LossFunction) -> tuple[Any, Any]:
    """Return an object that lives as long as ``loss_fn``, and the function if ``loss_fn`` is a bound method."""
    if inspect.ismethod(loss_fn):  # every access creates a new object
        return loss_fn.__self__, loss_fn.__func__
    return loss_fn, None


def _says_so(loss_fn: Any) -> bool:
    """Return whether ``loss_fn`` is annotated to return a :class:`LossSum`, perhaps with metrics."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004 — its annotations are needed
    said = getattr(function, "__annotations__", {}).get("return")
    if isinstance(said, str):
        try:  # alone, because other annotations may use names that exist only under TYPE_CHECKING
            alone: Any = SimpleNamespace(__annotations__={"return": said})
            names = getattr(inspect.unwrap(typing.cast(Any, function)), "__globals__", {})
            said = typing.get_type_hints(alone, names).get("return")
        except Exception:
            return False
    return LossSum in (said, *typing.get_args(said)[:1])
