"""The orders in which stages may be used: sets of used stages, and the stage that leads from one set to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeAlias

from ._problem import Slot, Step

SlotsAt: TypeAlias = Callable[[int, int], list[Slot]]  # of a kind of stage, at a place: one for each of its modes
MAX_SETS = 100_000


@dataclass(frozen=True)
class Lattice:
    """Sets of used stages, each after all its subsets: the steps into each, and how many stages it has."""

    into: list[list[Step]]
    depth: list[int]


def chain(stages: int, slots: SlotsAt) -> Lattice:
    """The one order 0, 1, 2, …"""
    return Lattice([[], *([Step(j, slot) for slot in slots(j, j)] for j in range(stages))], list(range(stages + 1)))


def lattice(kinds: Sequence[int], slots: SlotsAt) -> Lattice:
    """Every order: stages of one kind are alike, so a set is known by how many it has of each kind."""
    counts = Counter(kinds)
    size = prod(count + 1 for count in counts.values())
    if size > MAX_SETS:
        raise ValueError(
            f"a free order of {len(kinds)} stages of {len(counts)} kinds has {size} sets of stages to look at, "
            f"more than {MAX_SETS}; use fewer kinds or order='fixed'"
        )
    shared = lru_cache(maxsize=None)(slots)
    sets = list(product(*(range(count + 1) for count in counts.values())))
    index = {used: i for i, used in enumerate(sets)}

    def steps(used: tuple[int, ...]) -> list[Step]:
        return [
            Step(index[(*used[:t], used[t] - 1, *used[t + 1 :])], slot)
            for t, kind in enumerate(counts)
            if used[t]
            for slot in shared(kind, sum(used) - 1)
        ]

    return Lattice([steps(used) for used in sets], [sum(used) for used in sets])
