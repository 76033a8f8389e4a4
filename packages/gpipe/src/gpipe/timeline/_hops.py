"""Transfer times between workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Seconds = float | Callable[[int], float]
Transfer = Seconds | Sequence[Seconds]
"""The seconds of a transfer, or a function from bytes to seconds: one for all links, or one per link."""


@dataclass(frozen=True)
class Link:
    """A link between devices, on which a transfer takes ``latency + bytes / bandwidth`` seconds.

    Concurrent transfers do not slow each other down.

    Attributes:
        latency: seconds.
        bandwidth: bytes per second.

    Raises ValueError if ``latency`` is negative or not finite, or ``bandwidth`` is not positive.

    >>> Link(latency=1e-5, bandwidth=1e9)(10**7)
    0.01001
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency: expected finite, non-negative seconds, got {self.latency!r}")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth: expected a positive number of bytes per second, got {self.bandwidth!r}")

    def __call__(self, size: int) -> float:
        return self.latency + size / self.bandwidth


def hop_seconds(transfer: Transfer, crossing: Sequence[int | None]) -> list[float]:
    """Return the seconds of a transfer to each stage from the previous one.

    ``crossing`` is the number of bytes, or None if both stages are on the same worker, which takes no time.
    """
    links = crossing[1:]
    each = list(transfer) if isinstance(transfer, (list, tuple)) else [transfer] * len(links)
    if len(each) != len(links):
        raise ValueError(f"transfer: expected one entry per link ({len(links)}), got {len(each)}")
    times = [_seconds(one, size or 0) for one, size in zip(each, links, strict=True)]
    return [0.0] * len(crossing[:1]) + [0.0 if size is None else t for t, size in zip(times, links, strict=True)]


def _seconds(transfer: Any, size: int) -> float:
    seconds = transfer(size) if callable(transfer) else transfer
    if not isinstance(seconds, (int, float)):
        raise TypeError(f"transfer: expected seconds, or a function of bytes such as a Link, got {seconds!r}")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"transfer: expected finite, non-negative seconds, got {seconds!r}")
    return float(seconds)
