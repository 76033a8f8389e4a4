"""Costs at other numbers of rows than those measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ._data import LayerProfile

if TYPE_CHECKING:
    from ._record import Profile

_FIGURES = [field.name for field in fields(LayerProfile)[2:]]  # all but its name and kind


def at(measured: Sequence[Profile], rows: int) -> Profile:
    """See `Profile.at`; `measured` are the same layers at ascending numbers of rows."""
    if rows < 1:
        raise ValueError(f"rows: expected at least 1, got {rows}")
    exact = next((each for each in measured if each.rows == rows), None)
    if exact is not None:
        return replace(exact, others=())
    if len(measured) < 2:
        only = measured[0].rows
        raise ValueError(
            f"rows: this profile knows {only} rows only, and got {rows}; "
            f"measure at two: profile(..., rows=[{min(rows, only)}, {max(rows, only)}])"
        )
    # The last two that are not both above `rows`; at the start the first two.
    k = next((k for k in range(1, len(measured) - 1) if measured[k].rows > rows), len(measured) - 1)
    low, high = measured[k - 1], measured[k]
    share = (rows - low.rows) / (high.rows - low.rows)

    def between(a: LayerProfile, b: LayerProfile) -> LayerProfile:
        return replace(b, **{name: _mixed(getattr(a, name), getattr(b, name), share) for name in _FIGURES})

    return replace(
        high,
        layers=tuple(map(between, low.layers, high.layers)),
        loss=between(low.loss, high.loss) if low.loss and high.loss else None,
        rows=rows,
        chunks=max(1, round(high.chunks * high.rows / rows)),
        rounds=min(low.rounds, high.rounds),
        others=(),
    )


def _mixed(low: Any, high: Any, share: float) -> Any:
    """The figure on the line through two. Those of the layer alone, such as bytes of parameters, are equal in both."""
    if low is None or high is None:
        return None
    value = max(0, low + (high - low) * share)  # the line may be negative outside of the measured range
    return round(value) if isinstance(high, int) else value
