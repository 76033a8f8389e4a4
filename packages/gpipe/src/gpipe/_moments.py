"""Statistics of batch norm over a mini-batch, updated by micro-batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Moments:
    """Count, mean and squared deviation of each channel over some inputs.

    Attributes:
        mean: of shape (C,), at least in single precision.
        microbatches: the micro-batches of these inputs, if they belong to one run.
    """

    def __init__(self) -> None:
        self.microbatches: set[int] = set()
        self._count = 0
        self.mean = torch.zeros(())
        self._deviation = torch.zeros(())

    @property
    def variance(self) -> Tensor:
        """The unbiased variance."""
        return self._deviation / max(self._count - 1, 1)

    def add(self, input: Tensor) -> None:  # noqa: A002
        """Add the statistics of ``input``, of shape (N, C, ...), by the formula of Chan, Golub and LeVeque (1979)."""
        rows = input.transpose(0, 1).flatten(1).to(torch.promote_types(input.dtype, torch.float32))
        count, mean = rows.shape[1], rows.mean(1)
        deviation = (rows - mean[:, None]).square_().sum(1)
        if not self._count:
            self._count, self.mean, self._deviation = count, mean, deviation
            return
        total = self._count + count
        delta = mean - self.mean
        self._deviation = self._deviation + deviation + delta.square() * (self._count * count / total)
        self.mean = self.mean + delta * (count / total)
        self._count = total


class Tracks(Protocol):
    """A layer that tracks the statistics of mini-batches."""

    def update(self, seen: Moments) -> None:
        """Update the running statistics by those that were ``seen``."""


MiniBatchStatistics = dict[Tracks, list[Moments]]
"""The statistics of the deferred batch norms of a stage for one mini-batch, until its last forward is done.

They belong to the run and not to the layers, so those of a failed run are dropped. A layer that a forward calls k times
has k moments, and is updated k times, as in the plain model.
"""


def see(statistics: MiniBatchStatistics, layer: Tracks, microbatch: int, input: Tensor) -> None:  # noqa: A002
    calls = statistics.setdefault(layer, [])
    moments = next((each for each in calls if microbatch not in each.microbatches), None)
    if moments is None:
        moments = Moments()
        calls.append(moments)
    moments.microbatches.add(microbatch)
    moments.add(input)


def commit(statistics: MiniBatchStatistics) -> None:
    """After the last forward of a mini-batch: update the running statistics."""
    with torch.no_grad():
        for layer, calls in statistics.items():
            for moments in calls:
                layer.update(moments)
