"""The losses as a rank sees them that does not compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import map_tensors

from ..engine._losses import Losses, LossStage
from ..engine._scale import DeviceScale, Scale


class Verdict(NamedTuple):
    """What all ranks know of the losses of a mini-batch: its loss, metrics, and the scale of its gradients."""

    loss: Any
    dtype: torch.dtype
    metrics: dict[str, Any] | None
    scale: float


def verdict_of(losses: Losses) -> Verdict:
    """What the rank of the last stage tells the others: numbers, and copies of other tensors on the host."""
    scale = losses.scale
    scale = float(scale.on(torch.device("cpu"))) if isinstance(scale, DeviceScale) else scale
    loss, metrics = losses.loss, map_tensors(lambda each: each.detach().to("cpu", copy=True), losses.metrics)
    return Verdict(loss.item(), loss.dtype, metrics, scale)


class FarLoss(LossStage):
    """Takes the place of the losses on a rank without the last stage; ``verdict`` is set when all ranks have met."""

    verdict: Verdict
    scales = False  # as far as messages have told

    def __init__(self) -> None:
        super().__init__(_elsewhere, (), (), ())

    @property
    def scale(self) -> Scale:
        return self.verdict.scale

    @property
    def loss(self) -> Tensor:
        return torch.tensor(self.verdict.loss, dtype=self.verdict.dtype)

    @property
    def metrics(self) -> dict[str, Any] | None:
        return self.verdict.metrics


def _elsewhere(*_: Any) -> Any:
    raise AssertionError("the last stage is on another rank")
