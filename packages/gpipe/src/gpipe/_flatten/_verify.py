"""Check that the layers compute what the model computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..engine._loss_value import own_loss
from ._ending import Ending, Returned, ending_of
from ._inputs import Inputs
from ._own_loss import OwnLoss
from ._probe import kinds_of
from ._segment import ModelBlock, Pick
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
    "lists or another part of the result: GPipe(model, sample=sample, blocks=..., pick=...)"
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


def loss_seen(
    model: nn.Module, layers: nn.Sequential, inputs: Inputs, pick: Pick, shapes: Shapes | None = None
) -> tuple[Ending, Returned | None] | None:
    """How ``model`` computes its loss; None if it computes none.

    Returns:
        What computes the loss, and from what for ``inputs``; None for that if it does not tell the model's loss.
    """
    last: Any = layers[-1]
    blocks = [layer.net for layer in layers.children() if isinstance(layer, ModelBlock)]
    ending, expected = ending_of(model, inputs, blocks)
    try:
        own_loss(pick(expected))
    except TypeError:
        return None
    fields = expected if isinstance(expected, dict) else {"loss": expected}
    ending.fields, last.ending = frozenset(fields), ending
    with torch.no_grad():
        try:
            with ending.wanted():
                returned: Returned = in_a_row(layers, inputs)
            output = ending(last, inputs, returned)
        except Exception:  # it needs more than what modules around the loss return
            return ending, None
    found = output if isinstance(output, dict) else {"loss": output}
    ending.fields = frozenset(name for name, value in found.items() if _is_same(value, fields[name], shapes))
    return ending, returned if "loss" in ending.fields and not _is_nan(fields["loss"]) else None


def add_own_loss(
    model: nn.Module,
    layers: nn.Sequential,
    inputs: Inputs,
    pick: Pick,
    ending: Ending,
    returned: Returned | None,
    *,
    whole: bool,
) -> None:
    """Give the last layer what combines the losses of micro-batches.

    Args:
        ending, returned: as :func:`loss_seen` returned them.
        whole: whether the pipe may return the whole output, with the loss of all rows.
    """
    last: Any = layers[-1]
    has_ending, name = whole and returned is not None, type(model).__name__
    last.ending = ending if has_ending else None
    if returned is None:
        last.own_loss = OwnLoss(name, dict.fromkeys((False, True)), has_ending=False)
    else:
        found = kinds_of(model, ending, last, pick, inputs, returned)
        last.own_loss = OwnLoss(name, *found, has_ending=has_ending)


def _is_nan(loss: Tensor) -> bool:
    """Whether the sample has shown nothing: what stand-ins return is not a number either."""
    return not loss.is_meta and bool(loss.isnan())


def _is_same(found: Any, expected: Any, shapes: Shapes | None) -> bool:
    return difference(_pytree.tree_leaves(expected), _pytree.tree_leaves(found), shapes) is None
