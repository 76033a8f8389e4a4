"""The storages of a value that are alive only because the value is passed to the next layer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ._storages import storages


class Loose(NamedTuple):
    """A storage to which only the value refers that is passed from one layer to the next.

    Attributes:
        size: in bytes.
        leaves: the numbers of the tensors of the value that use it.
    """

    size: int
    leaves: frozenset[int]


class Watched:
    """Weak references to the storages of some tensors.

    Args:
        tensors: the tensors of a value, in order.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._leaves: dict[int, set[int]] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        for number, tensor in enumerate(tensors):
            for storage in storages(tensor):
                self._leaves.setdefault(storage._cdata, set()).add(number)
                self._storages[storage._cdata] = weakref.ref(storage)
                self._sizes[storage._cdata] = storage.nbytes()

    def alive(self) -> set[int]:
        """The numbers of the tensors whose memory, or a part of it, is still allocated."""
        return {number for key, ref in self._storages.items() if ref() is not None for number in self._leaves[key]}

    def gone(self, inputs: Watched, loose: Sequence[Loose]) -> list[Loose]:
        """The storages that were freed when the value was dropped.

        Args:
            inputs: the inputs of the layer that made the value. Storages of these count only if they are ``loose``;
                others are kept by earlier layers.
            loose: the loose storages of the inputs.
        """
        found = []
        for key, ref in self._storages.items():
            size = inputs._loose_size(key, loose) if key in inputs._leaves else self._sizes[key]
            if ref() is None and size:
                found.append(Loose(size, frozenset(self._leaves[key])))
        return found

    def _loose_size(self, key: int, loose: Sequence[Loose]) -> int:
        return max((each.size for each in loose if each.leaves & self._leaves[key]), default=0)
