"""Initialisation by the model's own methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..._flatten._skeleton import is_placeholder
from ._model import Layers, Owned, modules_of, modules_of_layer


class Applied:
    """Calls a function with every module, as ``nn.Module.apply`` does."""

    def __init__(self, function: Callable[[nn.Module], Any]) -> None:
        self._function = function

    def expect(self, layers: Layers) -> None:
        """Nothing: what a function initialises shows when it is called."""

    def fill(self, layers: Layers, name: str, fresh: Mapping[int, Tensor]) -> None:
        for owned in modules_of_layer(layers, name):
            self._function(owned.module)


class Reset:
    """Calls what modules have: ``reset_parameters()``, and ``_init_weights`` of the model around them."""

    def expect(self, layers: Layers) -> None:
        """Raise ValueError, naming them, if there are modules that cannot initialise what they own."""
        helpless = [owned for owned in modules_of(layers) if not can_reset(owned) and any(_on_meta(owned))]
        if helpless:
            named = ", ".join(f"{each.path!r} ({type(each.module).__name__})" for each in helpless)
            raise ValueError(
                f"init='reset' calls the reset_parameters() of each module that owns parameters or buffers; without "
                f"one: {named}; give it one, or pass init=function(module), or init=a state dict or its path"
            )

    def fill(self, layers: Layers, name: str, fresh: Mapping[int, Tensor]) -> None:
        for owned in modules_of_layer(layers, name):
            reset(owned, fresh)


def reset(owned: Owned, targets: Mapping[int, Tensor]) -> None:
    """Initialise those of the ``targets``, tensors by identity, that one module has, as it does it itself.

    Everything else keeps its values.
    """
    own = _reset_of(owned.module)
    others = [tensor for tensor in _below(owned.module) if id(tensor) not in targets and not is_placeholder(tensor)]
    with kept(others):
        if own and any(id(tensor) in targets for _, tensor in owned.tensors()):
            own()
        # This may be about modules inside: GPT-2 scales the projections of an attention when it sees the attention.
        if owned.owner is not None and any(id(tensor) in targets for tensor in _below(owned.module)):
            owned.owner._init_weights(owned.module)


@contextmanager
def kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Afterwards ``tensors`` have the values that they have now."""
    values = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def can_reset(owned: Owned) -> bool:
    return owned.owner is not None or _reset_of(owned.module) is not None


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    # Torch's MultiheadAttention and Transformer have it under the second name.
    for name in ("reset_parameters", "_reset_parameters"):
        found: Callable[[], Any] | None = getattr(module, name, None)
        if callable(found):
            return found
    return None


def _on_meta(owned: Owned) -> Iterable[bool]:
    return (tensor.is_meta for _, tensor in owned.tensors())


def _below(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
