"""The losses of a mini-batch, as seen by a rank that does not compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import map_tensors

from ..engine._losses import Losses
from ..engine._scale import DeviceScale, Scale


class LossSummary(NamedTuple):
    """The results of a mini-batch that all ranks need.

    Attributes:
        loss: the loss as a number of ``dtype``.
        metrics: the metrics, with tensors on the CPU.
        scale: the scale of the gradients.
        is_sum: whether the loss of the full mini-batch was a ``LossSum``.
        finding: the convention of losses of this kind, if any, for later runs.
    """

    loss: Any
    dtype: torch.dtype
    metrics: dict[str, Any] | None
    scale: float
    is_sum: bool
    finding: Any


def summarize_losses(losses: Losses) -> LossSummary:
    """Return the results that the rank of the last stage sends to the other ranks."""
    scale = losses.scale
    scale = float(scale.on(torch.device("cpu"))) if isinstance(scale, DeviceScale) else scale
    loss, metrics = losses.loss, map_tensors(lambda each: each.detach().to("cpu", copy=True), losses.metrics)
    return LossSummary(loss.item(), loss.dtype, metrics, scale, losses.is_sum, losses.finding())


class RemoteLoss(Losses):
    """Replaces the losses on ranks without the last stage. ``verdict`` is set once all ranks have synchronized.

    Args:
        kind: the kind of loss that the model computes.
    """

    verdict: LossSummary
    scales = False  # set when a message reports that losses return counts

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
