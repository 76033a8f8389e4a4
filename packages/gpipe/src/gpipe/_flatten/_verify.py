"""Check that the layers compute what the model computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ._ending import Ending, Returned
from ._inputs import Inputs
from ._segment import Pick
from ._shapes import Shapes


def expect_equal(
    model: nn.Module, layers: nn.Sequential, inputs: Inputs, pick: Pick, shapes: Shapes | None = None
) -> None:
    """Raise ValueError unless both give the same output for ``inputs``, in evaluation mode and without gradients.

    With ``shapes``, only shapes are compared, and no output may be computed from values of placeholders.
    """
    with torch.no_grad():
        expected = pick(inputs.call(model))
        try:
            value = in_a_row(layers, inputs)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be divided: with stand-ins for its blocks its forward fails "
                f"({type(error).__name__}: {error}); {_REASON}"
            ) from error
    wrong = difference(_pytree.tree_leaves(expected), _pytree.tree_leaves(value), shapes)
    if wrong:
        raise ValueError(f"{type(model).__name__} cannot be divided: its layers in a row give {wrong}; {_REASON}")


_REASON = (
    "it computes something between blocks, or otherwise than with the sample; let the blocks compute it, or name other "
    "lists or another part of the result: GPipe(gpipe.flatten(model, sample, blocks=..., pick=...), balance)"
)


def in_a_row(layers: nn.Sequential, inputs: Inputs) -> Any:
    """The output of the layers for ``inputs``."""
    value = layers[0](*inputs.args, **inputs.kwargs)
    for layer in list(layers)[1:]:
        value = layer(value)
    return value


def difference(expected: list[Any], found: list[Any], shapes: Shapes | None = None) -> str | None:
    """The difference between ``found`` and ``expected``, as text; None if there is none. On ``meta``, shapes are
    compared.
    """
    if len(expected) != len(found):
        return f"{len(found)} values instead of {len(expected)}"
    for a, b in zip(expected, found, strict=True):
        if not isinstance(a, Tensor):
            continue
        if a.shape != b.shape:
            return f"a tensor of shape {tuple(b.shape)} instead of {tuple(a.shape)}"
        if shapes is not None and shapes.is_unknown(b):
            return "what depends on modules of other layers"
        if not (a.is_meta or b.is_meta) and not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"values that are off by up to {float((a - b).abs().max()):g}"
    return None


def add_ending(
    model: nn.Module, layers: nn.Sequential, inputs: Inputs, ending: Ending | None, shapes: Shapes | None = None
) -> Returned | None:
    """Give the last layer the ``ending``, if that tells the loss as the model does; and which other fields it tells.

    Returns:
        What modules next to the loss returned for ``inputs``; None if there is no ending.
    """
    if ending is None:
        return None
    last = layers[-1]
    last.__dict__["ending"] = ending
    returned: Returned = {}
    with torch.no_grad():
        expected = inputs.call(model)
        ending.fields = frozenset(expected)
        try:
            with ending.wanted(), ending.learning():
                returned = in_a_row(layers, inputs)
            found = ending(inputs, returned, training=False)
        except Exception:  # it needs more than what modules around the loss return
            found = {}
    ending.fields = frozenset(name for name, value in found.items() if _is_same(value, expected[name], shapes))
    if "loss" not in ending.fields or _is_nan(expected["loss"]):
        del last.__dict__["ending"]
        return None
    return returned


def _is_nan(loss: Tensor) -> bool:
    """Whether the sample has shown nothing: what stand-ins return is not a number either."""
    return not loss.is_meta and bool(loss.isnan())


def _is_same(found: Any, expected: Any, shapes: Shapes | None) -> bool:
    return difference(_pytree.tree_leaves(expected), _pytree.tree_leaves(found), shapes) is None
