"""Make an ``nn.Sequential`` of any model."""

from __future__ import annotations

from typing import Any

from torch import nn

from .._flatten import flatten
from ._partition import expect_sequential


def as_sequential(model: nn.Module, sample: Any) -> nn.Sequential:
    """``model`` itself if it is an ``nn.Sequential``, else what :func:`gpipe.flatten` makes of it.

    Args:
        model: any module.
        sample: an input of the model; without one, the model must be an ``nn.Sequential``.

    Raises:
        TypeError: ``model`` is not an ``nn.Sequential``, and there is no sample.
    """
    if sample is not None and not isinstance(model, nn.Sequential):
        return flatten(model, sample)
    expect_sequential(model)
    assert isinstance(model, nn.Sequential)
    return model
