"""Generate tokens with a model whose blocks are on the devices of the stages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from .._flatten._generate import _across_devices, _moved


def generate(model: Any, blocks: Collection[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Return the result of ``model.generate(*args, **kwargs)``. The stages take turns on the full mini-batch."""
    first = next(model.parameters(), None)
    if first is not None:
        args, kwargs = _moved(args, first.device), _moved(kwargs, first.device)
    with _across_devices(model, blocks):
        return model.generate(*args, **kwargs)
