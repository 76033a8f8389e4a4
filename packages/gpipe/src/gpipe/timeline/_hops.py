"""How long things take from worker to worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Seconds = float | Callable[[int], float]
Transfer = Seconds | Sequence[Seconds]


@dataclass(frozen=True)
class Link:
    """The seconds that a number of bytes takes to cross: ``latency + bytes / bandwidth``.

    Attributes:
        latency: seconds.
        bandwidth: bytes a second.

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
    """For each stage, what it takes from the stage before to it.

    Args:
        transfer: of every link, or of each.
        crossing: the bytes; None where both stages are on one worker, which takes no time.

    Raises ValueError for a list of another length than there are links.
    """
    links = max(0, len(crossing) - 1)
    if isinstance(transfer, Sequence):
        if len(transfer) != links:
            raise ValueError(f"transfer: expected one entry for each of {links} links, got {len(transfer)}")
        each = list(transfer)
    else:
        each = [transfer] * links
    return [0.0] * (len(crossing) - links) + [
        0.0 if size is None else seconds(size) if callable(seconds) else seconds
        for size, seconds in zip(crossing[1:], each, strict=True)
    ]
