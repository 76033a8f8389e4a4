"""The metrics that loss functions return beside the loss, combined over all micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from microbatch import Batch, Mean, gather


def plain_metrics(found: Mapping[Any, Any]) -> dict[str, Any]:
    """The metrics of a micro-batch without their graph; numbers and whole scalars as floats, which can be averaged.

    Raises:
        TypeError: a metric is neither a tensor nor a number.
    """
    return {name: _plain(name, value) for name, value in found.items()}


def metrics_of_all(found: Sequence[dict[str, Any]], rows: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The metrics of the mini-batch.

    Scalars are averaged, weighted by the rows of each micro-batch. Other tensors must have k entries for each row, with
    the same k everywhere, and are concatenated.

    Raises:
        ValueError: names, dtypes or shapes differ between micro-batches, or do not fit the rows.
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
        whole = not value.dim() and not (value.is_floating_point() or value.is_complex())
        return value.to(torch.get_default_dtype()) if whole else value
    if isinstance(value, Real):
        return float(value)
    raise TypeError(
        f"metrics[{name!r}] of loss_fn is of type {type(value).__name__}; expected a tensor or a number; a tree of "
        "them has to be flattened"
    )
