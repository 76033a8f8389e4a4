"""Check that the layers compute what the model computes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ._convention import convention_of
from ._ending import Returned
from ._inputs import Inputs
from ._own_loss import OwnLoss
from ._placeholders import is_placeholder
from ._segment import ModelBlock, Segment, main_field
from ._shapes import Shapes
from ._tree import flattened


def expect_equal(name: str, expected: Any, layers: nn.Sequential, inputs: Inputs, shapes: Shapes | None) -> None:
    """Raise ValueError unless the layers give what is ``expected`` for ``inputs``, without gradients.

    With ``shapes``, only these are compared, and no output may be computed from values of placeholders.
    """
    try:
        value = _in_a_row(layers, inputs)
    except Exception as error:
        blocks = [layer.path for layer in layers if isinstance(layer, ModelBlock)]
        raise ValueError(
            f"{name} cannot be divided: with stand-ins for its blocks, {blocks[0]!r} to {blocks[-1]!r}, its forward "
            f"fails ({type(error).__name__}: {error}); {_REASON}"
        ) from error
    wrong = _difference(expected, value, shapes)
    if wrong:
        raise ValueError(f"{name} cannot be divided: its layers in a row give {wrong}; {_REASON}")


_REASON = (
    "let blocks compute this, or name other blocks or another part of the result: GPipe(model, sample=sample, "
    "blocks=[...], pick=...)"
)


def _in_a_row(layers: nn.Sequential, inputs: Inputs) -> Any:
    with torch.no_grad():
        value = layers[0](*inputs.args, **inputs.kwargs)
        for layer in list(layers)[1:]:
            if isinstance(layer, ModelBlock):
                layer.expect_called_alike(value)
            value = layer(value)
        return value


def _difference(expected: Any, found: Any, shapes: Shapes | None) -> str | None:
    """The difference between two values, as text; None if there is none."""
    pairs = flattened(expected)[0], flattened(found)[0]
    if len(pairs[0]) != len(pairs[1]):
        return f"{len(pairs[1])} values instead of {len(pairs[0])}"
    for a, b in zip(*pairs, strict=True):
        if not isinstance(a, Tensor):
            continue
        if a.shape != b.shape:
            return f"a tensor of shape {tuple(b.shape)} instead of {tuple(a.shape)}"
        if is_placeholder(b) or (shapes is not None and shapes.of(b)):
            return "what depends on modules of other layers"
        if not (a.is_meta or b.is_meta) and not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"values that are off by up to {float((a - b).abs().max()):g}"
    return None


def _of_twice(layers: nn.Sequential, inputs: Inputs) -> Any:
    for more in inputs.twice():  # a mask for all rows may have as many rows as several samples, but must not grow
        with suppress(Exception):
            return _in_a_row(layers, more)
    return {}


def _is_twice(more: Tensor, own: Tensor) -> bool:
    return own.dim() > 0 and more.shape == (2 * len(own), *own.shape[1:])


def _fields(output: Any, picked: Any) -> dict[Any, Any]:
    if isinstance(output, dict):
        return output
    return dict(enumerate(output)) if isinstance(output, tuple) else {"loss": picked}


def _followers(layers: nn.Sequential, inputs: Inputs) -> list[Returned]:
    """What modules next to the loss returned and follows the rows: one entry for each; and then, what has more too.

    A picture is a row of its own in some models, and later mini-batches have others for each text.
    """
    last = layers[-1]
    assert isinstance(last, Segment)
    assert last.ending is not None
    with suppress(Exception), torch.no_grad(), last.recording(last.ending) as recording:
        found, one = _in_a_row(layers, inputs), recording.shapes
        more, last.ending.tried = _of_twice(layers, inputs), (one, recording.shapes)
        follows = {key: own for key, own in found.items() if key in more and _is_twice(more[key], own)}
        return [{key: own for key, own in follows.items() if len(own) == inputs.rows()}, follows]
    return []


def _told(
    last: Segment, inputs: Inputs, found: Returned, fields: dict[Any, Any], shapes: Shapes | None
) -> frozenset[Any]:
    """The fields that the last segment makes of what was ``found``; none if it needs more."""
    assert last.ending is not None
    try:
        with torch.no_grad():
            output = last.ending(last, inputs, found)
    except Exception:
        return frozenset()
    told = _fields(output, last.pick(output))
    return frozenset(name for name, value in told.items() if _difference(fields[name], value, shapes) is None)


def add_own_loss(name: str, expected: Any, layers: nn.Sequential, inputs: Inputs, shapes: Shapes | None) -> None:
    """Give the last layer what computes the loss of a mini-batch, tried on the sample."""
    last = layers[-1]
    assert isinstance(last, Segment)
    ending = last.ending
    assert ending is not None
    picked = last.pick(expected)
    fields = _fields(expected, picked)
    loss = next((name for name, value in fields.items() if value is picked), "loss")
    returned, is_nan = None, not picked.is_meta and bool(picked.isnan())  # what stand-ins return is not a number, too
    for found in [] if is_nan else _followers(layers, inputs):
        ending.fields, ending.follows = frozenset(fields), frozenset(found)
        ending.fields = _told(last, inputs, found, fields, shapes)
        if loss in ending.fields:
            returned = found
            break
    ending.missing = [name for name, value in fields.items() if value is not None and name not in ending.fields]
    # A part of the output that the caller has picked is all that the pipe returns.
    last.ending = ending if last.pick is main_field and returned is not None else None
    convention = None if returned is None else convention_of(ending, last, inputs, returned)
    last.own_loss = OwnLoss(name, convention, None if returned is None else ending)
