"""Result types: cuts, loads and the proof of optimality, or the reason why there is no solution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from ._numbers import Number

T = TypeVar("T")


@dataclass(frozen=True)
class Partition:
    """Contiguous, non-empty blocks in order, with their loads and a proof that the bottleneck is minimal.

    sizes: the number of layers of each block.
    loads: the sum of the costs of each block.
    bottleneck: the largest load.
    lower_bound: max(Σ/k, heaviest layer); no partition has a smaller bottleneck.
    imbalance: the bottleneck divided by the mean load, bottleneck·k/Σ; 1.0 if Σ is zero.
    witness: the ends g₁ … g_k that prove it; see `verify`.
    gap: the largest possible relative distance of the objective from the optimum; 0 if it is proven optimal.
    """

    sizes: tuple[int, ...]
    loads: tuple[Number, ...]
    bottleneck: Number
    lower_bound: Number
    imbalance: Number
    witness: tuple[Any, ...]
    gap: Number = 0.0

    @property
    def cuts(self) -> tuple[int, ...]:
        """The index of the first layer of each block except block 0."""
        return tuple(accumulate(self.sizes[:-1]))

    def apply(self, sequence: Sequence[T]) -> list[list[T]]:
        """Split any sequence that is as long as the costs.

        Args:
            sequence: one item per layer.

        Returns:
            A list of items per block, in order.

        Raises:
            ValueError: the sequence does not have one item per layer.
        """
        if len(sequence) != sum(self.sizes):
            raise ValueError(f"the partition has {sum(self.sizes)} layers, but the sequence has {len(sequence)} items")
        return [list(sequence[start:end]) for start, end in pairwise([0, *self.cuts, len(sequence)])]


@dataclass(frozen=True)
class Placement(Partition):
    """A partition whose blocks are on stages, so that each block also has a time.

    Here `bottleneck`, `lower_bound` and `imbalance` refer to times: the time of the slowest block; max(Σ/Σ speeds,
    heaviest layer on the fastest stage); and the slowest block's time divided by Σ/Σ speeds.

    times: the time of each block: load / speed · the mode's factor, plus the cut after it.
    modes: the name of the mode of each block; None on a stage without modes.
    makespan: the time when the last micro-batch leaves the pipeline; None if `microbatches` was not given.
    witness: empty; `verify` checks optimality by its own computation.
    """

    times: tuple[Number, ...] = ()
    makespan: Number | None = None
    modes: tuple[str | None, ...] = ()


class Infeasible(ValueError):  # noqa: N818 — a finding about the problem rather than a mistake in the call
    """No placement satisfies the constraints.

    layer: the index of the first layer that fits on no stage; None if every layer fits on some stage.
    scale: the smallest sufficient factor on all capacities; None if no factor is sufficient.
    capacity: the smallest sufficient capacity if all stages have the same capacity; None otherwise.
    """

    def __init__(
        self, reason: str, *, layer: int | None = None, scale: Fraction | None = None, capacity: Number | None = None
    ) -> None:
        super().__init__(reason)
        self.layer = layer
        self.scale = scale
        self.capacity = capacity
