"""Validate what a loss function returns, and combine the metrics of all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import Batch, Mean, gather

from ..values._describe import shapes

LossFunction = Callable[..., Any]
"""A function of an output, and of a target if any. It returns a value accepted by :func:`loss_value`."""

_FORMS = "expected a scalar tensor, or LossSum(total, count), either perhaps with a dict of metrics: (loss, metrics)"


class LossSum(NamedTuple):
    """The loss of a micro-batch as a sum and its divisor.

    The loss of the mini-batch is the sum of all totals, divided by the sum of all counts. With a loss function that
    returns this for every micro-batch, a step can begin backwards before all forwards have finished.

    Attributes:
        total: the sum, a scalar tensor.
        count: a number, or a one-element tensor without grad: the number of rows or labels, or a sum of weights.

    >>> import torch
    >>> LossSum(torch.tensor(6.0), 3)
    LossSum(total=tensor(6.), count=3)
    """

    total: Tensor
    count: Any


class LossValue(NamedTuple):
    """The validated result of a loss function.

    Attributes:
        total: the scalar tensor where the backward begins.
        count: the sum of all totals is divided by the sum of all counts; None if the loss is not a :class:`LossSum`.
        metrics: further values that the loss function returned, or None.
    """

    total: Tensor
    count: Any
    metrics: Mapping[Any, Any] | None


def loss_value(found: object) -> LossValue:
    """Return the :class:`LossValue` for the result ``found`` of a loss function."""
    metrics = None
    if isinstance(found, tuple) and not isinstance(found, LossSum):
        if len(found) != 2 or not isinstance(found[1], Mapping):
            raise _unclear(found)
        found, metrics = found
    if not isinstance(found, LossSum):
        return LossValue(_check_loss(found), None, metrics)
    _expect_number(found.count)
    return LossValue(_check_loss(found.total), found.count, metrics)


def _unclear(found: tuple[Any, ...]) -> ValueError:
    if len(found) > 1 and all(isinstance(each, Tensor | Real) for each in found[:2]):
        return ValueError(
            f"loss_fn returned a tuple of {len(found)}, whose second number may be a count or a metric; return "
            'gpipe.LossSum(total, count) for a sum and its count, or (loss, {"name": metric})'
        )
    return ValueError(f"loss_fn returned a tuple of {len(found)}; {_FORMS}")


def own_loss(output: Any) -> Any:
    if has_own_loss(output):
        return output if isinstance(output, LossSum) else _entry(output)
    raise TypeError(
        "without a loss_fn the output must be the loss: a scalar tensor, or with one as output.loss; got "
        f"{shapes(output)}; {'set return_dict=True, ' if isinstance(output, tuple) else ''}give loss_fn=..., or "
        "what the model computes its loss from, such as labels"
    )


def has_own_loss(output: Any) -> bool:
    found = _entry(output)
    return isinstance(found, Tensor) and not found.dim()


def _entry(output: Any) -> Any:
    """Return the loss in an output: itself, its entry ``loss``, or the only trainable scalar of a tuple."""
    if isinstance(output, Tensor | LossSum):
        return output.total if isinstance(output, LossSum) else output
    if isinstance(output, Mapping):
        return output.get("loss")
    if not isinstance(output, tuple | list) or hasattr(output, "loss"):
        return getattr(output, "loss", None)
    scalars = [each for each in output if isinstance(each, Tensor) and not each.dim() and each.is_floating_point()]
    trained = [each for each in scalars if each.requires_grad] or scalars
    return trained[0] if len(trained) == 1 else None


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
            "the whole is not known when they do; return LossSum(total, count.detach()) if it is to be a constant, "
            "else the quotient, as a scalar"
        )


def _check_loss(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn returned {type(loss).__name__}; {_FORMS}")
    if loss.dim():
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}; expected a scalar: take its mean, or return "
            "gpipe.LossSum(loss.sum(), loss.numel())"
        )
    if loss.is_complex():
        raise TypeError(f"loss_fn returned {loss.dtype}; expected a real scalar: take its .real or .abs()")
    return loss


def whole_metrics(found: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the metrics of a full mini-batch unchanged, but detached."""
    for name, value in found.items():
        _expect_metric(name, value)
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()}


def plain_metrics(found: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the detached metrics of a micro-batch; numbers and integer scalars become floats, for averaging."""
    return {name: _plain(name, value) for name, value in found.items()}


def metrics_of_all(found: Sequence[dict[str, Any]], rows: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Combine the metrics of all micro-batches.

    Scalars are averaged, weighted by rows. Other tensors must have k entries per row, with the same k everywhere, and
    are concatenated.
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
    _expect_metric(name, value)
    if not isinstance(value, Tensor):
        return float(value)
    value = value.detach()
    # The average of integers, such as numbers of hits, is not an integer.
    whole = not value.dim() and not (value.is_floating_point() or value.is_complex())
    return value.to(torch.get_default_dtype()) if whole else value


def _expect_metric(name: Any, value: Any) -> None:
    if not isinstance(value, Tensor | Real):
        raise TypeError(
            f"metrics[{name!r}] of loss_fn is of type {type(value).__name__}; expected a tensor or a number; a tree of "
            "them has to be flattened"
        )
