"""Whether the layers compute what the model computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ._inputs import Inputs
from ._segment import Pick


def expect_equal(model: nn.Module, layers: nn.Sequential, inputs: Inputs, pick: Pick) -> None:
    """Raise ValueError unless both make the same of ``inputs``, in evaluation mode and without gradients."""
    with torch.no_grad():
        expected = pick(inputs.call(model))
        try:
            value: Any = layers[0](*inputs.args, **inputs.kwargs)
            for layer in list(layers)[1:]:
                value = layer(value)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be divided: with stand-ins for its blocks its forward fails "
                f"({type(error).__name__}: {error}); {_REASON}"
            ) from error
    wrong = _difference(_pytree.tree_leaves(expected), _pytree.tree_leaves(value))
    if wrong:
        raise ValueError(f"{type(model).__name__} cannot be divided: its layers in a row give {wrong}; {_REASON}")


_REASON = (
    "it computes something between blocks, or needs at the end what it computed at the start; let the blocks compute "
    "it, name other lists by blocks=, or take another part of the result by pick="
)


def _difference(expected: list[Any], found: list[Any]) -> str | None:
    if len(expected) != len(found):
        return f"{len(found)} values instead of {len(expected)}"
    for a, b in zip(expected, found, strict=True):
        if not isinstance(a, Tensor) or a.is_meta:
            continue
        if a.shape != b.shape:
            return f"a tensor of shape {tuple(b.shape)} instead of {tuple(a.shape)}"
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"values that are off by up to {float((a - b).abs().max()):g}"
    return None
