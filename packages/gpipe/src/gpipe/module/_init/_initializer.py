"""The ``init`` argument of ``GPipe``: fill layers by reset, by a function, or from a state dict."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from .._names import Flattened
from ._model import Layers, Owned, get_layer_state, get_prefix, iterate_modules, modules_of_layer
from ._quantized import find_packed, is_part, unpack
from ._sources import state_dict_at

Initializer = Callable[[Layers, str, Mapping[int, Tensor]], None]
"""A function that initializes one layer. It receives all layers, the name of this one, and the fresh tensors by id.

A fresh tensor has been allocated, but not written.
"""


def get_initializer(init: Any) -> Initializer | None:
    if init is None:
        return None
    if isinstance(init, str) and init == "reset":
        return reset_layer
    if isinstance(init, (str, os.PathLike)):
        init = state_dict_at(init)
    if isinstance(init, Mapping):
        return Loaded(init)
    if callable(init):
        return partial(_apply, init)
    raise TypeError(
        "init must be 'reset', a function of a module, a state dict, or the path of a checkpoint; "
        f"got {type(init).__name__}"
    )


def _apply(function: Callable[[nn.Module], Any], layers: Layers, name: str, fresh: Mapping[int, Tensor]) -> None:
    """Call ``function`` with every module of a layer, as ``nn.Module.apply`` does."""
    for owned in modules_of_layer(layers, name):
        function(owned.module)


def reset_layer(layers: Layers, name: str, fresh: Mapping[int, Tensor]) -> None:
    """Call each module's ``reset_parameters()``, and ``_init_weights`` of the model around it, if they exist."""
    for owned in modules_of_layer(layers, name):
        _reset(owned, fresh)


def _reset(owned: Owned, targets: Mapping[int, Tensor]) -> None:
    """Initialize the ``targets`` in one module. All other tensors keep their values."""
    own = _find_reset(owned.module)
    below = [*owned.module.parameters(), *owned.module.buffers()]
    with _kept([tensor for tensor in below if id(tensor) not in targets]):
        if own and any(id(tensor) in targets for _, tensor in owned.tensors()):
            own()
        # This may also initialize submodules: when called with an attention, GPT-2 scales its projections.
        if owned.owner is not None and any(id(tensor) in targets for tensor in below):
            owned.owner._init_weights(owned.module)


def _find_reset(module: nn.Module) -> Callable[[], Any] | None:
    # torch's MultiheadAttention and Transformer use the second name.
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


@contextmanager
def _kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    values = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


class Loaded:
    """Load layers from a state dict, which may be lazy, and has the names of the model.

    Non-persistent buffers, which no state dict contains, are computed by the modules' own methods.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def expect_names(self, layers: Layers) -> None:
        expected = {key: value for name in layers for key, value in get_layer_state(layers, name).items()}
        # A tied tensor may be saved under only one of its names.
        saved = {id(expected[key]): key for key in self._state if key in expected}
        self._saved = {key: saved[id(tensor)] for key, tensor in expected.items() if id(tensor) in saved}
        self._packed = find_packed(expected, self._state)
        parts = {key for keys in self._packed.values() for key in keys.values()}
        missing = [key for key in expected if key not in self._saved]
        extra = [key for key in self._state if key not in expected and key not in parts]
        unexpected = [key for key in extra if not _is_allowed(layers, key)]
        if missing or unexpected:
            raise ValueError(
                f"init: the state dict does not fit the model; missing: {_join_names(missing)}; unexpected: "
                f"{_join_names(unexpected)}; if the checkpoint contains more than the model, pass the model's state "
                "dict"
                + (
                    "; a quantized checkpoint needs a model with quantized layers on 'meta'"
                    if any(is_part(expected, key) for key in unexpected)
                    else ""
                )
            )

    def __call__(self, layers: Layers, name: str, fresh: Mapping[int, Tensor]) -> None:
        for owned in modules_of_layer(layers, name):
            _reset(owned, {id(tensor): tensor for tensor in owned.find_computed() if id(tensor) in fresh})
        names = get_layer_state(layers, name)
        read = {key for key, value in names.items() if key in self._state or id(value) in fresh}
        arrived = read & self._packed.keys()
        read -= arrived
        # Already loaded through a tied tensor: load it with its own values.
        state = OrderedDict(
            {key: self._state[self._saved[key]] if key in read else value.detach() for key, value in names.items()}
        )
        state._metadata = getattr(self._state, "_metadata", None)  # type: ignore[attr-defined]  # versions of modules
        _load(layers[name], name, state)
        for key in arrived:
            unpack(names[key], self._state[key], {part: self._state[own] for part, own in self._packed[key].items()})


def _load(layer: nn.Module, name: str, state: OrderedDict[str, Any]) -> None:
    if name and "." not in name:
        Flattened(OrderedDict({name: layer})).load_state_dict(state)  # its errors contain the full names
        return
    size = len(get_prefix(name))
    own = OrderedDict({key[size:]: value for key, value in state.items()})
    versions = getattr(state, "_metadata", None) or {}
    own._metadata = {  # type: ignore[attr-defined]
        key[size:]: value for key, value in versions.items() if f"{key}.".startswith(get_prefix(name))
    }
    layer.load_state_dict(own)


def _is_allowed(layers: Layers, name: str) -> bool:
    """Return whether a Hugging Face model allows checkpoints to contain an additional entry ``name``."""
    owners = {id(each.owner): each.owner for each in iterate_modules(layers)}
    patterns = [p for o in owners.values() for p in getattr(o, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return any(re.search(pattern, name) for pattern in patterns)


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
