"""Make an ``nn.Sequential`` of any model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._partition import expect_sequential


def as_sequential(model: nn.Module, sample: Any, *, blocks: Any = None, pick: Any = None) -> nn.Sequential:
    """``model`` itself if it is an ``nn.Sequential``, else what :func:`gpipe.flatten` makes of it."""
    if sample is not None and not isinstance(model, nn.Sequential):
        from .._flatten._flatten import flatten  # here, since most pipes are made of layers

        return flatten(model, sample, blocks=blocks, pick=pick)
    expect_sequential(model)
    if blocks is not None or pick is not None:
        raise TypeError("blocks= and pick= tell how a model with a forward of its own is flattened; leave them out")
    assert isinstance(model, nn.Sequential)
    return model
