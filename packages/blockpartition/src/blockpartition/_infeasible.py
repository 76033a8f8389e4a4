"""The error of a problem without a solution."""

from __future__ import annotations

from fractions import Fraction

from ._grid import Number


class Infeasible(ValueError):  # noqa: N818 — a finding about the problem rather than a mistake in the call
    """No placement satisfies the constraints.

    layer: the number of the first layer that fits on no stage; None if each fits on some stage.
    scale: the smallest factor on all capacities that would be enough; None if no factor would.
    capacity: the smallest capacity that would be enough, if all stages have the same one; None otherwise.
    """

    def __init__(
        self, reason: str, *, layer: int | None = None, scale: Fraction | None = None, capacity: Number | None = None
    ) -> None:
        super().__init__(reason)
        self.layer = layer
        self.scale = scale
        self.capacity = capacity
