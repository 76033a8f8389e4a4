"""The orders of devices to search, if the devices differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import permutations

MOST = 6
"""The most orders to search: all of two kinds of devices among four, and all of three devices."""

_FEW = 6
"""The most devices whose orders are enumerated."""

Device = tuple[int | None, float]
"""The limit of its memory in bytes, if any, and its relative speed."""


def orders(devices: Sequence[Device]) -> list[tuple[int, ...]]:
    """Return orders of the devices, as tuples of their indices; the given order is first.

    Equal devices are not exchanged. If there are more than :data:`MOST` orders, devices are sorted by memory and speed.

    >>> orders([(24, 1.0), (12, 1.0)])
    [(0, 1), (1, 0)]
    >>> orders([(24, 1.0), (24, 1.0)])
    [(0, 1)]
    """
    given = tuple(range(len(devices)))
    if len({*devices}) == 1:
        return [given]
    if len(devices) <= _FEW:
        every = _distinct(devices, permutations(given))
        if len(every) <= MOST:
            return every
    by_memory = sorted(given, key=lambda k: math.inf if (room := devices[k][0]) is None else room)
    by_speed = sorted(given, key=lambda k: devices[k][1])
    return _distinct(devices, [given, by_memory[::-1], by_memory, by_speed[::-1], by_speed])


def _distinct(devices: Sequence[Device], found: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    first: dict[tuple[Device, ...], tuple[int, ...]] = {}
    for order in found:
        first.setdefault(tuple(devices[k] for k in order), tuple(order))
    return [*first.values()]
