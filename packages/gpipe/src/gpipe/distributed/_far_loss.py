"""The losses as a rank sees them that does not compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import map_tensors

from ..engine._losses import Losses
from ..engine._scale import DeviceScale, Scale


class Verdict(NamedTuple):
    """What all ranks know of the losses of a mini-batch: its loss, metrics, and the scale of its gradients.

    Attributes:
        is_sum: whether the loss of the whole mini-batch was a ``LossSum``.
        finding: what was found out about losses of this kind, for later runs.
    """

    loss: Any
    dtype: torch.dtype
    metrics: dict[str, Any] | None
    scale: float
    is_sum: bool
    finding: Any


def verdict_of(losses: Losses) -> Verdict:
    """What the rank of the last stage tells the others: numbers, and copies of other tensors on the host."""
    scale = losses.scale
    scale = float(scale.on(torch.device("cpu"))) if isinstance(scale, DeviceScale) else scale
    loss, metrics = losses.loss, map_tensors(lambda each: each.detach().to("cpu", copy=True), losses.metrics)
    return Verdict(loss.item(), loss.dtype, metrics, scale, losses.is_sum, losses.finding())


class FarLoss(Losses):
    """Takes the place of the losses on a rank without the last stage; ``verdict`` is set when all ranks have met.

    Args:
        kind: the kind of the loss that a model computes.
    """

    verdict: Verdict
    scales = False  # as far as messages have told

    def __init__(self, kind: Any = None, *, is_whole: bool, replays: bool = False) -> None:
        super().__init__(_elsewhere)
        self.kind, self.is_whole, self.replays = kind, is_whole, replays

    @property
    def scale(self) -> Scale:
        return self.verdict.scale

    @property
    def loss(self) -> Tensor:
        return torch.tensor(self.verdict.loss, dtype=self.verdict.dtype)

    @property
    def metrics(self) -> dict[str, Any] | None:
        return self.verdict.metrics

    @property
    def is_sum(self) -> bool:
        return self.verdict.is_sum

    def finding(self) -> Any:
        return self.verdict.finding


def _elsewhere(*_: Any) -> Any:
    raise AssertionError("the last stage is on another rank")
