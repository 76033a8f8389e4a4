"""What the rank of the last stage tells the others about the losses."""

from __future__ import annotations

import base64
from typing import Any, Final

import torch

from ..engine._losses import Losses
from ..engine._scale import DeviceScale
from ..values._leaves import Activation
from ._far_loss import Verdict
from ._forms import Form, form_of

_NUMBERS: Final = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
"""The dtypes of a loss that JSON can hold as a number without rounding."""


def written(losses: Losses) -> dict[str, Any]:
    """The verdict as JSON holds it."""
    scale, loss = losses.scale, losses.loss
    scale = float(scale.on(torch.device("cpu"))) if isinstance(scale, DeviceScale) else scale
    kind = str(loss.dtype).removeprefix("torch.")
    if losses.metrics is None and kind in _NUMBERS and not loss.dim():
        return {"scale": scale, "kind": kind, "loss": loss.item()}
    form, data = form_of(Activation(loss if losses.metrics is None else (loss, losses.metrics)))
    return {
        "scale": scale,
        "form": form.text,
        "data": [base64.b64encode(bytes(part.cpu().tolist())).decode() for part in data],
    }


def verdict_of(report: dict[str, Any]) -> Verdict:
    """The verdict that :func:`written` has written."""
    if "loss" in report:
        return Verdict(torch.tensor(report["loss"], dtype=_NUMBERS[report["kind"]]), None, report["scale"])
    data = [torch.tensor([*base64.b64decode(part)], dtype=torch.uint8) for part in report["data"]]
    activation = Form.parse(report["form"]).rebuild(data)
    assert isinstance(activation, Activation)
    value = activation.value
    loss, metrics = value if isinstance(value, tuple) else (value, None)
    return Verdict(loss, metrics, report["scale"])
