"""The contents of lists, dicts and sets that modules keep in attributes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint._snapshot import CONSTANTS, OF_ANY_MODULE, Slot, may_keep
from ..checkpoint._state import SMALL

_FILLS: dict[type, Callable[[Any], Callable[[Any], None]]] = {
    list: lambda own: own.extend,
    deque: lambda own: own.extend,
    dict: lambda own: own.update,
    OrderedDict: lambda own: own.update,
    defaultdict: lambda own: own.update,
    set: lambda own: own.update,
}
"""For each type of container, a function that fills it."""


class Contents:
    """The containers in attributes of ``modules``, those inside them, and copies of their contents."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(filter(may_keep, modules))
        self._attributes: dict[Slot, Any] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._tensors: list[tuple[Slot, Tensor, Tensor | None, int]] = []
        self._generators: dict[int, torch.Generator] = {}
        for slot in self._slots():
            if type(slot.value) in _FILLS:
                self._attributes[slot] = slot.value
            self._take(slot, slot.value, inner=False)

    @property
    def generators(self) -> Iterable[torch.Generator]:
        """The generators in attributes and in containers, each once."""
        return self._generators.values()

    def put_back(self) -> list[Slot]:
        """Give all containers their old contents. Returns the attributes with tensors that cannot be restored."""
        for slot in self._slots():
            if slot not in self._attributes and type(slot.value) in _FILLS:
                del slot.values[slot.name]
        for slot, value in self._attributes.items():
            slot.values[slot.name] = value
        for container, then in self._containers.values():
            container.clear()
            _FILLS[type(container)](container)(then)
        changed = [each for each in self._tensors if each[1]._version != each[3]]
        for _, tensor, copy, _ in changed:
            if copy is not None:
                tensor.copy_(copy)
        return [slot for slot, _, copy, _ in changed if copy is None]

    def _slots(self) -> Iterable[Slot]:
        return [
            Slot(module, "attribute", name)
            for module in self._modules
            for name, value in vars(module).items()
            if name not in OF_ANY_MODULE and type(value) not in CONSTANTS
        ]

    def _take(self, slot: Slot, value: Any, *, inner: bool = True) -> None:
        if isinstance(value, torch.Generator):
            self._generators[id(value)] = value
        elif isinstance(value, Tensor):
            if inner and not value.is_inference():  # tensors in attributes themselves are handled elsewhere
                copied = value.numel() <= SMALL and not value.requires_grad
                self._tensors.append((slot, value, value.clone() if copied else None, value._version))
        elif type(value) is tuple:
            self._take_all(slot, value)
        elif type(value) in _FILLS and id(value) not in self._containers:
            self._containers[id(value)] = value, value.copy()
            self._take_all(slot, value.values() if isinstance(value, dict) else value)

    def _take_all(self, slot: Slot, values: Iterable[Any]) -> None:
        if not CONSTANTS.issuperset(map(type, values)):
            for value in values:
                self._take(slot, value)
