"""Load parameters and buffers from a state dict, layer by layer."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..._flatten._names import Flattened
from ._model import Layers, Owned, modules_of, modules_of_layer, names_of
from ._own import can_reset, reset
from ._sources import Group, Source, group_with


class Loaded:
    """Loads every layer with what ``source`` has under the model's own names.

    Buffers that no state dict has are computed by the modules themselves, or come from ``source`` too.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._group: Group

    def expect(self, layers: Layers) -> None:
        """Raise ValueError, naming all, if names or shapes are other ones than those of the model."""
        expected = {key: value for name in layers for key, value in names_of(layers, name).items()}
        computed = {
            each.named(key): tensor for each in modules_of(layers) for key, tensor in each.computed() if tensor.is_meta
        }
        self._group = group = group_with(self._source, expected)
        found = group.shapes()
        problems = [
            *_listed("missing", _missing(expected, found)),
            *_listed("unexpected", _unexpected(layers, [k for k in found if k not in expected and k not in computed])),
            *_listed("of another shape", _misshapen({**expected, **computed}, found)),
            *_listed("not saved in a state dict, but computed by the constructor", self._lost(layers, found)),
        ]
        if problems:
            raise ValueError(f"init: {group.where} does not fit the model; " + "; ".join(problems) + _advice(problems))

    def _lost(self, layers: Layers, found: Mapping[str, Any]) -> Iterator[str]:
        """Buffers on meta whose values are in no source."""
        for owned in modules_of(layers):
            for key, buffer in owned.computed():
                if buffer.is_meta and owned.named(key) not in found and not can_reset(owned):
                    yield owned.named(key)

    def fill(self, layers: Layers, name: str, fresh: Mapping[int, Tensor]) -> None:
        names = names_of(layers, name)
        for owned in modules_of_layer(layers, name):
            self._compute(owned, fresh)
        state = OrderedDict(self._group.read([key for key in names if key in self._group.shapes()]))
        state._metadata = self._group.metadata  # type: ignore[attr-defined]  # versions of modules
        # A tied tensor may be saved under one of its names: under the others it is itself.
        for key in names.keys() - state.keys():
            state[key] = names[key].detach()
        Flattened(OrderedDict({name: layers[name]})).load_state_dict(state)

    def _compute(self, owned: Owned, fresh: Mapping[int, Tensor]) -> None:
        buffers = {owned.named(key): buffer for key, buffer in owned.computed() if id(buffer) in fresh}
        given = self._group.read([key for key in buffers if key in self._group.shapes()])
        targets = {id(buffer): buffer for key, buffer in buffers.items() if key not in given}
        if targets:
            reset(owned, targets)
        for key, value in given.items():
            buffers[key].copy_(value)


def _missing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    there = {id(tensor) for key, tensor in expected.items() if key in found}
    return [key for key, tensor in expected.items() if key not in found and id(tensor) not in there]


def _unexpected(layers: Layers, names: Iterable[str]) -> list[str]:
    """Unexpected names, without those that models of Hugging Face allow."""
    owners = {id(each.owner): each.owner for each in modules_of(layers) if each.owner is not None}
    patterns = [p for o in owners.values() for p in getattr(o, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _misshapen(expected: Mapping[str, Any], found: Mapping[str, torch.Size | None]) -> Iterator[str]:
    for key, value in expected.items():
        shape = found.get(key)
        if isinstance(value, Tensor) and shape is not None and shape != value.shape:
            yield f"{key}, {tuple(shape)} instead of {tuple(value.shape)}"


def _listed(what: str, names: Iterable[str]) -> Iterator[str]:
    listed = [f"{name!r}" if "," not in name else name for name in names]
    if listed:
        yield f"{what}: {', '.join(listed)}"


def _advice(problems: list[str]) -> str:
    if not problems[-1].startswith("not saved"):
        return ""
    return (
        " (build these with data, outside of torch.device('meta'), add them to the state dict by these names, or let "
        "their module compute them in reset_parameters())"
    )
