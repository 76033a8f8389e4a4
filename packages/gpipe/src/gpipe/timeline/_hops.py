"""The times of transfers between workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..schedule import Step

Seconds = float | Callable[[int], float]
Transfer = Seconds | Sequence[Seconds]


@dataclass(frozen=True)
class Link:
    """A link between devices: a transfer takes ``latency + bytes / bandwidth`` seconds.

    Links with the same name are one link, which carries one transfer at a time, in either direction; others wait in the
    order of their arrival. It is busy for ``bytes / bandwidth``; latencies may overlap with the next transfer. A link
    without a name carries any number of transfers at once.

    Attributes:
        latency: seconds.
        bandwidth: bytes per second.
        name: a name, if transfers have to wait for each other.

    >>> Link(latency=1e-5, bandwidth=1e9)(10**7)
    0.01001
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    name: str | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency: expected seconds that are not negative, got {self.latency!r}")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth: expected a positive number of bytes a second, got {self.bandwidth!r}")
        if not isinstance(self.name, (str, type(None))):
            raise TypeError(f"name: expected text, got {self.name!r}")

    def __call__(self, size: int) -> float:
        return self.latency + size / self.bandwidth


def hop_seconds(transfer: Transfer, crossing: Sequence[int | None]) -> list[float]:
    """For each stage, the seconds of a transfer from the stage before.

    Args:
        transfer: the transfer time of all links, or of each.
        crossing: the bytes sent to each stage; None if both stages are on one worker, which takes no time.

    Raises ValueError for a list of another length than there are links.
    """
    each = _each(transfer, max(0, len(crossing) - 1))
    return [0.0] * (len(crossing) - len(each)) + [
        0.0 if size is None else seconds(size) if callable(seconds) else seconds
        for size, seconds in zip(crossing[1:], each, strict=True)
    ]


class Queues:
    """Arrivals over links of which some have names, and carry one transfer at a time: first come, first served.

    Args:
        transfer, crossing: as for :func:`hop_seconds`.
    """

    def __init__(self, transfer: Transfer, crossing: Sequence[int | None]) -> None:
        self._seconds = hop_seconds(transfer, crossing)
        self._links = [None, *_each(transfer, max(0, len(crossing) - 1))]
        self._sizes = crossing
        self._free: dict[str, float] = {}

    def arrival(self, source: Step, target: Step, end: float) -> float:
        """When the result of ``source``, which ends at ``end``, is at ``target``; called in the order of these ends."""
        hop = max(source.stage, target.stage)
        link, size = self._links[hop], self._sizes[hop]
        if size is None or not isinstance(link, Link) or link.name is None:
            return end + self._seconds[hop]
        begin = max(end, self._free.get(link.name, 0.0))
        self._free[link.name] = begin + size / link.bandwidth
        return begin + self._seconds[hop]


def is_shared(transfer: Transfer) -> bool:
    """Whether transfers may have to wait for each other."""
    each = transfer if isinstance(transfer, Sequence) else [transfer]
    return any(isinstance(link, Link) and link.name is not None for link in each)


def _each(transfer: Transfer, links: int) -> list[Seconds]:
    if isinstance(transfer, str) or not isinstance(transfer, Sequence):
        return [_expect_seconds(transfer)] * links
    if len(transfer) != links:
        raise ValueError(f"transfer: expected one entry for each of {links} links, got {len(transfer)}")
    return [_expect_seconds(each) for each in transfer]


def _expect_seconds(seconds: Any) -> Seconds:
    if callable(seconds):
        found: Seconds = seconds
        return found
    if not isinstance(seconds, (int, float)):
        raise TypeError(f"transfer: expected seconds, or a function of bytes such as a Link, got {seconds!r}")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"transfer: expected seconds that are not negative, got {seconds!r}")
    return float(seconds)
