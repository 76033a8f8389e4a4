"""Detect models on ``meta``, whose tensors have no values."""

from __future__ import annotations

from torch import nn


def has_data(model: nn.Module) -> bool:
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def expect_data(model: nn.Module, what: str) -> None:
    """Raise ValueError if ``model`` is on ``meta``, because ``what`` has to run it."""
    if not has_data(model):
        raise ValueError(
            f"{what} runs the model, which is on 'meta' and has no data; pass a materialized model, such as a few of "
            "its layers, or balance by bytes: gpipe.balance.balance_by_size(..., device='meta')"
        )
