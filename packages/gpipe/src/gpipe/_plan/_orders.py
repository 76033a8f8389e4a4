"""The orders of devices to search, if the devices or their links differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, permutations

from ._links import Links

MOST = 6
"""The most orders to search: all of two kinds of devices among four, and all of three devices."""

_FEW = 6
"""The most devices whose orders are enumerated."""

_SIZE = 2**20
"""Links are compared by the seconds of a transfer of this many bytes."""

Device = tuple[int | None, float]
"""The limit of its memory in bytes, if any, and its relative speed."""

Order = tuple[int, ...]


def orders(devices: Sequence[Device], links: Links) -> list[Order]:
    """Return orders of the devices, as tuples of their indices; the given order is first.

    Equal devices with equal links are not exchanged. If there are more than :data:`MOST` orders, devices are sorted by
    memory and speed, and one order has the fastest links between neighbors.

    >>> from ._links import LINK, links
    >>> orders([(24, 1.0), (12, 1.0)], links(2, lambda i, j: LINK))
    [(0, 1), (1, 0)]
    >>> orders([(24, 1.0), (24, 1.0)], links(2, lambda i, j: LINK))
    [(0, 1)]
    """
    given = tuple(range(len(devices)))
    if len({*devices}) == 1 and _are_alike(links):
        return [given]
    if len(devices) <= _FEW:
        every = _distinct(devices, links, permutations(given))
        if len(every) <= MOST:
            return every
    by_memory = sorted(given, key=lambda k: math.inf if (room := devices[k][0]) is None else room)
    by_speed = sorted(given, key=lambda k: devices[k][1])
    sorts = [by_memory[::-1], by_memory, by_speed[::-1], by_speed]
    return _distinct(devices, links, [given, *sorts, _shortest(links)])


def _distinct(devices: Sequence[Device], links: Links, found: Iterable[Sequence[int]]) -> list[Order]:
    first: dict[object, Order] = {}
    for order in found:
        between = tuple(links[i][j] for i, j in pairwise(order))
        first.setdefault((tuple(devices[k] for k in order), between), tuple(order))
    return [*first.values()]


def _are_alike(links: Links) -> bool:
    return len({link for i, each in enumerate(links) for j, link in enumerate(each) if i != j}) <= 1


def _shortest(links: Links) -> Order:
    """Return an order with fast links between neighbors: of few devices, the fastest ones."""
    given = tuple(range(len(links)))
    if _are_alike(links):
        return given
    if len(links) <= _FEW:
        return min(permutations(given), key=lambda order: _seconds(order, links))
    return min((_nearest(first, links) for first in given), key=lambda order: _seconds(order, links))


def _nearest(first: int, links: Links) -> Order:
    """Return the order that always continues with the fastest link to a remaining device."""
    order, left = [first], {*range(len(links))} - {first}
    while left:
        order.append(min(sorted(left), key=lambda k: links[order[-1]][k](_SIZE)))
        left.discard(order[-1])
    return tuple(order)


def _seconds(order: Order, links: Links) -> float:
    return sum(links[i][j](_SIZE) for i, j in pairwise(order))
