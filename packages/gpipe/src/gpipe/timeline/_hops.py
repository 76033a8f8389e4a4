"""The times of transfers between workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Seconds = float | Callable[[int], float]
Transfer = Seconds | Sequence[Seconds]
"""The seconds of a transfer, or a function that returns them for a number of bytes; for all links, or for each."""


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
    """For each stage, the seconds of a transfer from the stage before; ``crossing`` is None on the same worker."""
    links = crossing[1:]
    each = list(transfer) if isinstance(transfer, (list, tuple)) else [transfer] * len(links)
    if len(each) != len(links):
        raise ValueError(f"transfer: expected one entry for each of {len(links)} links, got {len(each)}")
    times = [_seconds(one, size or 0) for one, size in zip(each, links, strict=True)]
    return [0.0] * len(crossing[:1]) + [0.0 if size is None else t for t, size in zip(times, links, strict=True)]


def _seconds(transfer: Any, size: int) -> float:
    seconds = transfer(size) if callable(transfer) else transfer
    if not isinstance(seconds, (int, float)):
        raise TypeError(f"transfer: expected seconds, or a function of bytes such as a Link, got {seconds!r}")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"transfer: expected seconds that are not negative, got {seconds!r}")
    return float(seconds)
