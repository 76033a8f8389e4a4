"""What a loss function returns: checked, and the metrics of all micro-batches combined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import Batch, Mean, gather

from ..values._describe import shapes

LossFunction = Callable[..., Any]
"""A function of an output, and of a target if there is one, that returns what :func:`loss_value` takes."""

_FORMS = "expected a scalar loss, or (sum, count), either with a dict of metrics behind it, as in (loss, metrics)"


class LossValue(NamedTuple):
    """The loss of a micro-batch.

    Attributes:
        total: the scalar tensor at which the backward begins.
        count: divides the sum of all totals, together with the other counts; None if ``total`` is a mean.
        metrics: further values that the loss function returned, or None.
    """

    total: Tensor
    count: Any
    metrics: Mapping[Any, Any] | None


def loss_value(found: object) -> LossValue:
    """The :class:`LossValue` of ``found``, which a loss function returned."""
    if not isinstance(found, tuple):
        return LossValue(_checked(found), None, None)
    has_metrics = len(found) > 1 and isinstance(found[-1], Mapping)
    numbers, metrics = (found[:-1], found[-1]) if has_metrics else (found, None)
    if len(numbers) == 1 and has_metrics:
        return LossValue(_checked(numbers[0]), None, metrics)
    if len(numbers) != 2:
        raise ValueError(f"loss_fn returned a tuple of {len(found)}; {_FORMS}")
    _expect_number(numbers[1])
    return LossValue(_checked(numbers[0]), numbers[1], metrics)


def own_loss(output: Any) -> Any:
    if has_own_loss(output):
        return _entry(output)
    raise TypeError(
        "without a loss_fn the output must be the loss: a scalar tensor, or with one as output.loss; got "
        f"{shapes(output)}; {'set return_dict=True, ' if isinstance(output, tuple) else ''}give loss_fn=..., or "
        "what the model computes its loss from, such as labels"
    )


def has_own_loss(output: Any) -> bool:
    found = _entry(output)
    return isinstance(found, Tensor) and not found.dim()


def _entry(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def expect_trains(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss that does not require grad: it does not depend on the output, or no parameter "
            "requires grad; use pipe.evaluate(...) or pipe(input) to compute without training"
        )


def _expect_number(count: object) -> None:
    if not isinstance(count, Tensor | Real) or (isinstance(count, Tensor) and count.is_complex()):
        kind = count.dtype if isinstance(count, Tensor) else type(count).__name__
        raise TypeError(f"loss_fn returned a count of {kind}; expected a real number, or a tensor of one")
    if isinstance(count, Tensor) and count.numel() != 1:
        raise ValueError(f"loss_fn returned a count of shape {tuple(count.shape)}; expected one number: take its sum")
    if isinstance(count, Tensor) and count.requires_grad:
        raise ValueError(
            "loss_fn returned a count that requires grad, but gradients flow through the sum only, since the count of "
            "the whole is not known when they do; return (sum, count.detach()) if it is to be a constant, else use "
            "pipe(input) and backward()"
        )


def _checked(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn returned {type(loss).__name__}; expected a scalar tensor, or (sum, count)")
    if loss.dim():
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}; expected a scalar: take its mean, or return "
            "(loss.sum(), loss.numel())"
        )
    if loss.is_complex():
        raise TypeError(f"loss_fn returned {loss.dtype}; expected a real scalar: take its .real or .abs()")
    return loss


def plain_metrics(found: Mapping[Any, Any]) -> dict[str, Any]:
    """The metrics of a micro-batch without their graph; numbers and whole scalars as floats, which can be averaged."""
    return {name: _plain(name, value) for name, value in found.items()}


def metrics_of_all(found: Sequence[dict[str, Any]], rows: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The metrics of the mini-batch.

    Scalars are averaged, weighted by rows. Other tensors must have k entries for each row, with the same k everywhere,
    and are concatenated.
    """
    spec = {name: None if isinstance(value, Tensor) and value.dim() else Mean() for name, value in found[0].items()}
    try:
        return dict(gather(map(Batch, found, rows), spec))
    except ValueError as error:
        raise ValueError(
            "the metrics of loss_fn must have the same names for all micro-batches, and each be a number or a scalar, "
            f"which is averaged by rows, or a tensor with an entry for each row; {error}"
        ) from error


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        # An average of whole numbers, such as counts of hits, is not whole.
        whole = not value.dim() and not (value.is_floating_point() or value.is_complex())
        return value.to(torch.get_default_dtype()) if whole else value
    if isinstance(value, Real):
        return float(value)
    raise TypeError(
        f"metrics[{name!r}] of loss_fn is of type {type(value).__name__}; expected a tensor or a number; a tree of "
        "them has to be flattened"
    )
