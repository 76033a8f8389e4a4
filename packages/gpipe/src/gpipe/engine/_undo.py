"""Undo what a failed step has changed besides gradients, before the step is tried again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..checkpoint._device_generator import DeviceGenerator
from ..checkpoint._served import PROCESS, borrowing
from ..checkpoint._snapshot import Slot, View
from ..checkpoint._state import SMALL, is_renormed
from ._contents import Contents


class Undo:
    """What some modules and all generators are like now, before a step.

    Small tensors are copied every time. Large ones are copied until a step has left them as they were; after that,
    a change of them can be seen, but not undone.

    Args:
        modules: the layers, and a loss that is a module.
        devices: whose generators are drawn from.
        still: the slots of large tensors that steps have left as they were; added to by :meth:`settle`.
    """

    def __init__(self, modules: Iterable[nn.Module], devices: Iterable[torch.device], still: set[Slot]) -> None:
        every = list(dict.fromkeys(each for module in modules for each in module.modules()))
        self._still = still
        self._view = View(every, ())
        self._sight = self._view.look()
        self._copies = {slot: slot.value.detach().clone() for slot in self._sight.slots if self._is_copied(slot)}
        self._contents = Contents(every)
        self._devices = [DeviceGenerator(device) for device in dict.fromkeys(devices)]
        with borrowing:
            self._process = PROCESS.get_state()

    def settle(self) -> None:
        """The step is complete: large tensors that it has left as they were need no copy next time."""
        moved = {*self._sight.moved(self._view.look())}
        self._still.update(slot for slot, copy in self._copies.items() if copy.numel() > SMALL and slot not in moved)

    def put_back(self) -> list[Slot]:
        """Let all be as before; the slots of which that is impossible."""
        moved = self._sight.moved(self._view.look())
        lost = [slot for slot in moved if not self._recoverable(slot)]
        self._still.difference_update(lost)
        for slot in moved:
            if slot not in lost:
                slot.value = self._sight.value(slot)
        with torch.no_grad():
            for slot, copy in self._copies.items():
                _fill(slot.value, copy)
        self._rewind()
        return [*lost, *self._contents.put_back()]

    def _rewind(self) -> None:
        for device in self._devices:
            device.rewind()
        with borrowing:
            PROCESS.set_state(self._process)

    def _is_copied(self, slot: Slot) -> bool:
        value = slot.value
        if not isinstance(value, Tensor) or slot.kind == "_parameters" or is_lazy(value):
            return False
        return value.numel() <= SMALL or slot not in self._still

    def _recoverable(self, slot: Slot) -> bool:
        before = self._sight.value(slot)
        if slot.kind == "_parameters":
            return is_renormed(slot)
        return slot in self._copies or not isinstance(before, Tensor) or before._version == self._version(slot)

    def _version(self, slot: Slot) -> int:
        return self._sight.versions[self._sight.slots.index(slot)]


def _fill(tensor: Tensor, copy: Tensor) -> None:
    if tensor.shape != copy.shape:  # it was resized
        tensor.set_(copy)  # type: ignore[call-overload]
    elif not torch.equal(tensor, copy):
        tensor.copy_(copy)
