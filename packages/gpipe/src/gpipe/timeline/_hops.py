"""The times of transfers between workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Seconds = float | Callable[[int], float]
Transfer = Seconds | Sequence[Seconds]


@dataclass(frozen=True)
class Link:
    """A link between devices: a transfer takes ``latency + bytes / bandwidth`` seconds.

    A link carries any number of transfers at once.

    Attributes:
        latency: seconds.
        bandwidth: bytes per second.

    >>> Link(latency=1e-5, bandwidth=1e9)(10**7)
    0.01001
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency: expected seconds that are not negative, got {self.latency!r}")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth: expected a positive number of bytes a second, got {self.bandwidth!r}")

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
