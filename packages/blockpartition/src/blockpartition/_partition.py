"""The answer: where to cut, what each block weighs, and why nothing does better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from ._grid import Number

T = TypeVar("T")


@dataclass(frozen=True)
class Partition:
    """Contiguous, non-empty blocks in order, with their loads and the proof that the bottleneck is the least possible.

    sizes: number of layers in each block.
    loads: sum of each block's costs, in the costs' own unit.
    bottleneck: the largest load.
    lower_bound: max(Σ/k, heaviest layer); no partition has a smaller bottleneck.
    imbalance: bottleneck·k/Σ; 1.0 is perfect, also where Σ is zero.
    witness: ends g₁ … g_k; see `verify`.
    gap: how far the objective may lie above the optimum, relative to the optimum; 0 is proven optimal.
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
        """Index of the first layer of each block but the first."""
        return tuple(accumulate(self.sizes[:-1]))

    def apply(self, sequence: Sequence[T]) -> list[list[T]]:
        """The blocks of any sequence as long as the costs.

        Args:
            sequence: items, one for each layer.

        Returns:
            A list of items for each block, in order.

        Raises:
            ValueError: more or fewer items than layers.
        """
        if len(sequence) != sum(self.sizes):
            raise ValueError(f"the partition is of {sum(self.sizes)} layers, the sequence has {len(sequence)}")
        return [list(sequence[start:end]) for start, end in pairwise([0, *self.cuts, len(sequence)])]


@dataclass(frozen=True)
class Placement(Partition):
    """A partition whose blocks are on stages, so that a block has a time besides its load.

    Here `bottleneck`, `lower_bound` and `imbalance` are about times: the slowest block, max(Σ/Σ speeds, heaviest layer
    on the fastest stage), and the slowest block against Σ/Σ speeds.

    order: which stage each block is on.
    times: load / speed and what the cut after the block adds.
    modes: in which of its stage's modes each block is; None on a stage without modes.
    makespan: when the last micro-batch leaves; None if their number was not given.
    witness: for the bottleneck, the ends that faster blocks could reach at most, as intervals for each set of stages;
        for the makespan, the bounds between which no placement finishes earlier. See `verify`.
    """

    order: tuple[int, ...] = ()
    times: tuple[Number, ...] = ()
    makespan: Number | None = None
    modes: tuple[str | None, ...] = ()


def check_sizes(sizes: tuple[int, ...], n: int) -> None:
    """ValueError unless these are the sizes of non-empty blocks of n layers."""
    for j, size in enumerate(sizes):
        if size < 1:
            raise ValueError(f"sizes[{j}] is {size}; every block needs at least one layer")
    if sum(sizes) != n:
        raise ValueError(f"the sizes add up to {sum(sizes)} layers, there are {n} costs")
