"""The losses as a rank sees them that does not compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import flatten, unflatten

from ..engine._losses import Losses, LossStage
from ..engine._scale import DeviceScale, Scale


class Verdict(NamedTuple):
    """What all ranks know of the losses of a mini-batch: its loss, metrics, and the scale of its gradients."""

    loss: Tensor
    metrics: dict[str, Any] | None
    scale: float


def verdict_of(losses: Losses) -> Verdict:
    """What the rank of the last stage tells the others, with copies of all tensors on the host."""
    scale = losses.scale
    scale = float(scale.on(torch.device("cpu"))) if isinstance(scale, DeviceScale) else scale
    leaves, tree = flatten((losses.loss, losses.metrics))
    copies = [leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    loss, metrics = unflatten(copies, tree)
    return Verdict(loss, metrics, scale)


class FarLoss(LossStage):
    """Takes the place of the losses on a rank without the last stage; ``verdict`` is set when all ranks have met."""

    verdict: Verdict

    def __init__(self) -> None:
        super().__init__(_elsewhere, (), (), ())
        self._counts_itself = False

    @property
    def scales(self) -> bool:
        return self._counts_itself

    @scales.setter
    def scales(self, counts: bool) -> None:
        self._counts_itself = self._counts_itself or counts

    @property
    def scale(self) -> Scale:
        return self.verdict.scale

    @property
    def loss(self) -> Tensor:
        return self.verdict.loss

    @property
    def metrics(self) -> dict[str, Any] | None:
        return self.verdict.metrics


def _elsewhere(*_: Any) -> Any:
    raise AssertionError("the last stage is on another rank")
