"""The metrics that loss functions return beside the loss, combined over all micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from microbatch import Batch, Mean, Split, gather


class Metrics:
    """The metrics of a mini-batch.

    Scalars are averaged, weighted by the rows of each micro-batch. Other tensors must have k entries for each row, with
    the same k everywhere, and are concatenated. Each micro-batch is checked against the earlier ones at once, so that
    an error is raised before the end of the step.

    Args:
        rows: the number of rows of each micro-batch.
    """

    def __init__(self, rows: Sequence[tuple[int, ...]]) -> None:
        self._rows = rows
        self._found: dict[int, dict[str, Any]] = {}
        self._kinds: dict[str, tuple[Any, ...]] = {}
        self._times: dict[str, set[int]] = {}

    def add(self, i: int, found: Mapping[Any, Any]) -> None:
        """Add the metrics of a micro-batch.

        Raises:
            TypeError: a metric is neither a tensor nor a number.
            ValueError: names or shapes differ from an earlier micro-batch, or do not fit the number of rows.
        """
        own = {name: _plain(name, value) for name, value in found.items()}
        kinds = {name: _kind(value) for name, value in own.items()}
        self._expect_alike(i, self._kinds or kinds, kinds)
        for name, value in own.items():
            self._expect_rows(i, name, value)
        self._kinds, self._found[i] = kinds, own

    def whole(self) -> dict[str, Any]:
        """The metrics of the mini-batch."""
        order = sorted(self._found)
        batches = [Batch(self._found[i], self._rows[i]) for i in order]
        spec = {name: Mean() if _is_scalar(value) else Split(0) for name, value in batches[0].value.items()}
        return dict(gather(batches, spec)) if spec else {}

    def _expect_alike(self, i: int, first: dict[str, Any], kinds: dict[str, Any]) -> None:
        if first.keys() != kinds.keys():
            raise ValueError(
                f"loss_fn returned the metrics {', '.join(kinds)} for micro-batch {i}, but {', '.join(first)} for "
                "another; return the same for all"
            )
        for name, kind in kinds.items():
            if kind != first[name]:
                raise ValueError(
                    f"metrics[{name!r}] of loss_fn is {_described(kind)} for micro-batch {i}, but "
                    f"{_described(first[name])} for another; they may differ in rows only"
                )

    def _expect_rows(self, i: int, name: str, value: Any) -> None:
        """Raise ValueError unless there are k entries for each row, with the same k in all micro-batches."""
        if _is_scalar(value):
            return
        size, rows = len(value), self._rows[i]
        times = {size // row for row in rows if row and size and not size % row}
        before = self._times.setdefault(name, times) if any(rows) else set()
        if not (before & times if any(rows) else not size):
            raise ValueError(
                f"metrics[{name!r}] of loss_fn has shape {tuple(value.shape)} for micro-batch {i}, which has "
                f"{' and '.join(map(str, rows))} rows; expected an entry for each row, as for all micro-batches, or a "
                "scalar, which is averaged by rows"
            )
        if any(rows):
            self._times[name] = before & times


def _plain(name: str, value: Any) -> Any:
    """``value`` without its graph; a float if it is a number, so that it can be averaged."""
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


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or not value.dim()


def _kind(value: Any) -> tuple[Any, ...]:
    """The type and shape that metrics of all micro-batches must share."""
    return (value.dtype, value.dim(), value.shape[1:]) if isinstance(value, Tensor) else ()


def _described(kind: tuple[Any, ...]) -> str:
    if not kind:
        return "a number"
    dtype, dimensions, row = kind
    return f"a tensor of {dtype} with rows of shape {tuple(row)}" if dimensions else f"a scalar of {dtype}"
