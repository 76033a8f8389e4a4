"""Run a model's layers once in training mode, and refuse what they would do otherwise than the model, silently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ._calls import Calls, watch
from ._inputs import Inputs
from ._segment import Segment
from ._shapes import Shapes
from ._skeleton import is_placeholder
from ._standins import ContextError, current_tape
from ._trunk import Trunk


@contextmanager
def in_mode(training: bool, *models: nn.Module) -> Iterator[None]:
    """A context in which ``models`` are in training or evaluation mode, as a whole."""
    before = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.train(training)
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def watched(model: nn.Module, inputs: Inputs, trunks: Sequence[Trunk]) -> Calls:
    """What ``model``, in evaluation mode, does in a run, and what it needs in training besides."""
    calls = watch(model, inputs, trunks)
    try:
        with in_mode(True, model):
            calls.add(watch(model, inputs, trunks))
    except Exception:  # such as a batch norm of one row: what it needs in training is seen when it trains
        return calls
    return calls


def expect_alike_in_training(name: str, layers: nn.Sequential, inputs: Inputs) -> None:
    """Raise ValueError, naming it, for buffers or random numbers of which the layers would have several.

    Each segment runs the model's forward from its beginning, with placeholders for what belongs to other segments.

    Args:
        name: of the model's class.
    """
    segments = [layer for layer in layers if isinstance(layer, Segment)]
    shared = _shared_buffers(segments)
    value: Any = inputs
    with in_mode(True, layers), _Draws() as draws:
        try:
            for k, layer in enumerate(layers):
                with torch.set_grad_enabled(isinstance(layer, Segment)):
                    value = layer(value) if k else layer(*inputs.args, **inputs.kwargs)
        except ContextError:
            raise
        except Exception:  # as above
            return
    changed = next((each for each, buffer, before in shared if not torch.equal(buffer, before)), None)
    if changed:
        raise ValueError(
            f"{name} cannot be divided: {changed!r}, a buffer, changes in training, and is used by several parts of "
            "the forward, before and after the blocks; let one module have it, and the others take what that returns"
        )
    if any(isinstance(leaf, Tensor) and draws.is_unknown(leaf) for leaf in _pytree.tree_leaves(value)):
        raise ValueError(
            f"{name} cannot be divided: its forward draws random numbers before blocks and uses them after these, "
            "where they would be drawn again; pass them as arguments, or let a module draw and return them"
        )


def _shared_buffers(segments: Sequence[Segment]) -> list[tuple[str, Tensor, Tensor]]:
    """The buffers that several segments have, with their names and values."""
    found: dict[Tensor, list[str]] = {}
    for segment in segments:
        for name, buffer in segment.net.named_buffers():
            if not is_placeholder(buffer):
                found.setdefault(buffer, []).append(name)
    return [(names[0], buffer, buffer.clone()) for buffer, names in found.items() if len(names) > 1]


class _Draws(Shapes):  # type: ignore[no-untyped-call]
    """Follows random numbers that a segment draws before its own part of the forward begins."""

    def is_unknown(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._unknown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        tape = current_tape()
        is_early = tape is not None and not tape.begun
        if is_early and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.note(result)
        return result
