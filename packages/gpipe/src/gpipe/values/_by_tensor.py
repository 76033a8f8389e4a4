"""Map tensors to values by identity, without keeping them alive."""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import ref

from torch import Tensor

V = TypeVar("V")


class ByTensor(Generic[V]):
    """Maps tensors to values. Each entry has a weak reference, because the id of a freed tensor may be reused."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Tensor], V]] = {}

    def __setitem__(self, tensor: Tensor, value: V) -> None:
        self._entries[id(tensor)] = ref(tensor), value

    def get(self, tensor: Tensor) -> V | None:
        found = self._entries.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def __contains__(self, tensor: Tensor) -> bool:
        found = self._entries.get(id(tensor))
        return found is not None and found[0]() is tensor

    def remove(self, tensor: Tensor) -> None:
        """Remove the entry of ``tensor``, if there is one."""
        self._entries.pop(id(tensor), None)

    def remove_freed(self) -> None:
        """Remove the entries of tensors that no longer exist."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}

    def clear(self) -> None:
        self._entries.clear()
