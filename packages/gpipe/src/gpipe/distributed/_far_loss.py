"""The losses of a mini-batch, on a rank that does not compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import map_tensors

from ..engine._losses import Losses
from ..engine._scale import DeviceScale, Scale


class Verdict(NamedTuple):
    """The results of a mini-batch that all ranks have: the loss, the metrics, and the scale of the gradients.

    Attributes:
        is_sum: whether the loss of the full mini-batch was a ``LossSum``.
        finding: the convention of losses of this kind, if any, for later runs.
    """

    loss: Any
    dtype: torch.dtype
    metrics: dict[str, Any] | None
    scale: float
    is_sum: bool
    finding: Any


def verdict_of(losses: Losses) -> Verdict:
    """Return the values that the rank of the last stage sends to the other ranks: numbers, and tensors on the CPU."""
    scale = losses.scale
    scale = float(scale.on(torch.device("cpu"))) if isinstance(scale, DeviceScale) else scale
    loss, metrics = losses.loss, map_tensors(lambda each: each.detach().to("cpu", copy=True), losses.metrics)
    return Verdict(loss.item(), loss.dtype, metrics, scale, losses.is_sum, losses.finding())


class FarLoss(Losses):
    """Replaces the losses on a rank without the last stage. ``verdict`` is set when the ranks synchronize.

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
