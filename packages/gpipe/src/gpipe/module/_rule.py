"""How the losses of micro-batches add up to that of the mini-batch, where that is known.

It is known if the caller says so, if ``loss_fn`` returns a :class:`gpipe.LossSum`, or if it is one of torch's losses.
Nothing is inferred from what a loss function computes: any other loss is computed once, on the outputs of all rows.
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
from ._keywords import Call
from ._torch_losses import torch_loss


class HasRows(Protocol):
    """A micro-batch, or what is known of one elsewhere."""

    @property
    def rows(self) -> Sequence[int]:
        """The number of rows of each tensor."""


class Rule(NamedTuple):
    """How losses of micro-batches add up.

    Attributes:
        loss_fn: is called with the output of each micro-batch, and its target.
        weights: the weight of each loss, a number or a tensor; None if ``loss_fn`` returns a :class:`LossSum`.
        more: for each micro-batch, further arguments of ``loss_fn``.
    """

    loss_fn: LossFunction
    weights: Sequence[Any] | None
    more: Sequence[tuple[Any, ...]] | None = None


def rule_of(call: Call, batches: Sequence[HasRows], out_spec: Any, *, returns_sums: bool, adds: bool) -> Rule | None:
    """The rule for a call of ``step`` or ``evaluate``; None if it is not known how the losses add up.

    Args:
        batches: the micro-batches, with their numbers of rows.
        out_spec: of the pipe, which says how an output that is the loss is joined.
        returns_sums: whether ``loss_fn`` is known to return a :class:`LossSum`.
        adds: whether the model computes its loss by the convention of ``num_items_in_batch``.
    """
    loss_fn = own_loss if call.loss_fn is None else call.loss_fn
    shares, divisor = shares_of(batches), call.divisor
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
        return Rule(known.counted, weights, [(count, every) for count in counts])
    if call.reduction is not None:
        return Rule(loss_fn, shares if call.reduction == "mean" else [1.0 / divisor] * len(batches))
    if call.loss_fn is None:
        if adds or isinstance(out_spec, Sum):
            return Rule(loss_fn, [1.0] * len(batches))
        return Rule(loss_fn, shares) if isinstance(out_spec, Mean) else None
    return Rule(loss_fn, None) if returns_sums else None


def shares_of(batches: Sequence[HasRows]) -> list[float]:
    """The share of all rows that each micro-batch has."""
    # The first number of rows is that of the samples, also where other tensors have several rows for each.
    rows = [batch.rows[0] for batch in batches]
    return [row / max(1, sum(rows)) for row in rows]


def _cut_alike(rows: int, batches: Sequence[HasRows]) -> tuple[int, ...]:
    """The rows of micro-batches of a target of so many ``rows``, if a tensor of the input has as many; else nothing."""
    columns = zip(*[batch.rows for batch in batches], strict=True)
    return next((column for column in columns if sum(column) == rows), ())


def has_loss(schedule: Schedule | str | None) -> bool:
    return isinstance(schedule, Schedule) and schedule.has_loss


def is_left_open(schedule: Schedule | str | None) -> bool:
    """Whether the caller leaves it to the pipe which schedule a step has."""
    return schedule is None or (isinstance(schedule, str) and schedule.lower() == "auto")


def named_for(schedule: str | None, *, whole: bool) -> str:
    """The name of the schedule: by default, the one that holds the least for this kind of loss."""
    if whole and is_left_open(schedule):
        return "fill_drain"
    return "1f1b" if schedule is None else schedule


def unlike(call: Call, schedule: Schedule | str | None) -> Callable[[LossValue], ValueError]:
    """What makes the error for a loss function that does not return what its rule says."""

    def error(value: LossValue) -> ValueError:
        if value.count is not None and call.reduction is None:
            return ValueError(
                "the last layer returned a LossSum, by which losses are combined, beside out_spec=; make the pipe "
                "without it"
            )
        if value.count is not None:
            return ValueError(
                f"loss_fn returned a LossSum, by which losses are combined, beside reduction={call.reduction!r}; "
                "return a scalar, or leave out reduction= and normalizer="
            )
        if call.loss_fn is None:
            return ValueError(
                "the last layer returned the loss of a micro-batch, of which is not known how those of all add up; say "
                'that it is a mean over rows, or a sum: reduction="mean" or "sum"; or return gpipe.LossSum(total, '
                "count)"
            )
        if schedule is None:
            return ValueError(
                f"loss_fn returned a scalar, and a LossSum before, or by its annotation; {_WAYS}; or give "
                "another function for each kind"
            )
        return ValueError(
            "loss_fn returned a scalar, of which is not known how those of micro-batches add up, and "
            f"{_titled(schedule)} begins backwards before all forwards are done; {_WAYS}; or leave out schedule=: then "
            "the loss is computed once, on the outputs of all rows"
        )

    return error


def of_model_under(model: str, schedule: Schedule | str | None) -> ValueError:
    """The error for a model's own loss under a schedule that cannot wait for all rows."""
    return ValueError(
        f"{model} computes a loss, of which is not known how those of micro-batches add up, and {_titled(schedule)} "
        "begins backwards before all forwards are done; leave out schedule=: then the loss is computed once, on all "
        'rows; or say how they add up: reduction="mean", or "sum" beside num_items_in_batch=; or give a loss_fn that '
        "returns gpipe.LossSum(total, count), of the part of the output that it needs"
    )


def _titled(schedule: Schedule | str | None) -> str:
    return f"schedule={schedule!r}" if isinstance(schedule, str) else "the schedule"


_WAYS = (
    'return gpipe.LossSum(total, count); or say that it is a mean over rows, or a sum: reduction="mean" or "sum"; or '
    "give one of torch's losses itself, such as F.cross_entropy"
)

OF_ALL_ROWS = (
    "the loss of step() is computed once, on the outputs of all micro-batches, since it is not known how their losses "
    f"add up: all outputs are kept until then. To begin backwards earlier (1F1B): {_WAYS}"
)

OF_MODEL = (
    "the loss of step() is computed once, by the model, on what its blocks returned for all micro-batches, since it is "
    "not known how their losses add up: all activations are kept until then. To begin backwards earlier (1F1B), say "
    'how: step(**batch, num_items_in_batch=count, reduction="sum") for a model that divides the sum of its losses by '
    'that number, reduction="mean" for a mean over rows'
)

_LEAST = torch.finfo(torch.float32).tiny


class SeenSums:
    """The loss functions that have returned a :class:`LossSum`, or are annotated so."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()

    def add(self, loss_fn: LossFunction) -> None:
        owner, function = _identity(loss_fn)
        with suppress(TypeError):  # of what cannot be hashed, or referred to weakly
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
    """An object that lives as long as ``loss_fn``, and the function if that is one of its methods."""
    if inspect.ismethod(loss_fn):  # a new object each time
        return loss_fn.__self__, loss_fn.__func__
    return loss_fn, None


def _says_so(loss_fn: Any) -> bool:
    """Whether the annotation of ``loss_fn`` says that it returns a :class:`LossSum`, perhaps with metrics."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004 — the function, for its annotations
    said = getattr(function, "__annotations__", {}).get("return")
    if isinstance(said, str):
        try:  # alone, since others may have names that only a type checker sees
            alone: Any = SimpleNamespace(__annotations__={"return": said})
            names = getattr(inspect.unwrap(typing.cast(Any, function)), "__globals__", {})
            said = typing.get_type_hints(alone, names).get("return")
        except Exception:
            return False
    return LossSum in (said, *typing.get_args(said)[:1])
