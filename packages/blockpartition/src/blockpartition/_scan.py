"""Filling short blocks: a look at every layer is cheaper than a bisection for each block."""

from __future__ import annotations

_SHORT = 8  # layers; a bisection takes about as long as a look at so many


def are_short(prefix: list[int], blocks: int) -> bool:
    """Whether the blocks have few layers on average."""
    return len(prefix) <= _SHORT * blocks


def ends_by_scan(prefix: list[int], bound: int, blocks: int) -> list[int]:
    """The ends of blocks filled up to the bound from the left; no layer may exceed it."""
    ends, limit, before = [], bound, 0
    for position, total in enumerate(prefix):
        if total > limit:
            ends.append(position - 1)
            limit = before + bound
        before = total
    ends += [len(prefix) - 1] * (blocks - len(ends))
    return ends[:blocks]
