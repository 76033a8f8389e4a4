"""What the rank of the last stage tells the others of the losses."""

from __future__ import annotations

import base64
from typing import Any

import torch

from ..engine._losses import Losses
from ..engine._scale import DeviceScale
from ..values._leaves import Activation
from ._far_loss import Verdict
from ._forms import Form, form_of


def written(losses: Losses) -> dict[str, Any]:
    """The verdict, as JSON can write it."""
    scale = losses.scale
    value = losses.loss if losses.metrics is None else (losses.loss, losses.metrics)
    form, data = form_of(Activation(value))
    return {
        "scale": float(scale.on(torch.device("cpu"))) if isinstance(scale, DeviceScale) else scale,
        "form": form.text,
        "data": [base64.b64encode(bytes(part.cpu().tolist())).decode() for part in data],
    }


def verdict_of(report: dict[str, Any]) -> Verdict:
    """The verdict that :func:`written` has written."""
    data = [torch.tensor([*base64.b64decode(part)], dtype=torch.uint8) for part in report["data"]]
    activation = Form.parse(report["form"]).rebuild(data)
    assert isinstance(activation, Activation)
    value = activation.value
    loss, metrics = value if isinstance(value, tuple) else (value, None)
    return Verdict(loss, metrics, report["scale"])
