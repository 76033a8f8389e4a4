"""The answer: where to cut, what each block weighs, and why nothing does better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from ._grid import Number

T = TypeVar("T")


@dataclass(frozen=True)
class Partition:
    """Contiguous, non-empty blocks in order, with their loads and the proof that the bottleneck is the least possible.

    sizes: number of layers in each block.
    loads: sum of each block's costs, in the costs' own unit.
    bottleneck: the largest load.
    lower_bound: max(Σ/k, heaviest layer), below which nobody could hope to come.
    imbalance: bottleneck·k/Σ; 1.0 is perfect, also where Σ is zero.
    witness: ends g₁ … g_k; see `verify`.
    gap: how far the objective may lie above the optimum, relative to the optimum; 0 is proven optimal.
    """

    sizes: tuple[int, ...]
    loads: tuple[Number, ...]
    bottleneck: Number
    lower_bound: Number
    imbalance: float
    witness: tuple[int, ...]
    gap: Number = 0

    @property
    def cuts(self) -> tuple[int, ...]:
        """Index of the first layer of each block but the first."""
        return tuple(accumulate(self.sizes[:-1]))

    def apply(self, sequence: Sequence[T]) -> list[list[T]]:
        """The blocks of any sequence as long as the costs."""
        if len(sequence) != sum(self.sizes):
            raise ValueError(f"the partition is of {sum(self.sizes)} layers, the sequence has {len(sequence)}")
        return cut(sequence, [0, *self.cuts, len(sequence)])


def cut(sequence: Sequence[T], ends: Sequence[int]) -> list[list[T]]:
    """The blocks between consecutive ends."""
    return [list(sequence[start:end]) for start, end in pairwise(ends)]
