"""What batch norm has seen of a mini-batch, micro-batch by micro-batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Moments:
    """Count, mean and squared deviation of each channel over some inputs.

    Attributes:
        mean: of shape (C,), at least in single precision.
        microbatches: those that these inputs belong to, where they are of one run.
    """

    def __init__(self) -> None:
        self.microbatches: set[int] = set()
        self._count = 0
        self.mean = torch.zeros(())
        self._deviation = torch.zeros(())

    @property
    def variance(self) -> Tensor:
        """The unbiased variance, of shape (C,)."""
        return self._deviation / max(self._count - 1, 1)

    def add(self, input: Tensor) -> None:  # noqa: A002
        """Take in ``input`` of shape (N, C, ...), by the formula of Chan, Golub and LeVeque (1979)."""
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
        """Move the running statistics towards those that were ``seen``."""


MiniBatchStatistics = dict[Tracks, list[Moments]]
"""What the deferred batch norms of a stage see of one mini-batch, until its last forward is done.

They belong to the run and not to the layers: those of a run that failed half-way are gone with it. A layer that a
forward calls k times has k moments, and makes k updates, as in the plain model.
"""


def see(statistics: MiniBatchStatistics, layer: Tracks, microbatch: int, input: Tensor) -> None:  # noqa: A002
    """``layer`` normalises ``input`` of shape (N, C, ...)."""
    calls = statistics.setdefault(layer, [])
    moments = next((each for each in calls if microbatch not in each.microbatches), None)
    if moments is None:
        moments = Moments()
        calls.append(moments)
    moments.microbatches.add(microbatch)
    moments.add(input)


def commit(statistics: MiniBatchStatistics) -> None:
    """All micro-batches have been seen: update the running statistics of every layer that was called."""
    with torch.no_grad():
        for layer, calls in statistics.items():
            for moments in calls:
                layer.update(moments)
