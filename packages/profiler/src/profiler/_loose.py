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
        self._found: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, set[int]]] = {}
        for number, tensor in enumerate(tensors):
            for storage in storages(tensor):
                new = weakref.ref(storage), storage.nbytes(), set[int]()
                self._found.setdefault(storage._cdata, new)[2].add(number)

    def alive(self) -> set[int]:
        """The numbers of the tensors whose memory, or a part of it, is still allocated."""
        return {number for ref, _, leaves in self._found.values() if ref() is not None for number in leaves}

    def gone(self, inputs: Watched, loose: Sequence[Loose]) -> list[Loose]:
        """The storages that were freed when the value was dropped.

        Args:
            inputs: the inputs of the layer that made the value. Storages of these count only if they are ``loose``;
                others are kept by earlier layers.
            loose: the loose storages of the inputs.
        """
        found = []
        for key, (ref, size, leaves) in self._found.items():
            if key in inputs._found:
                size = max((each.size for each in loose if each.leaves & inputs._found[key][2]), default=0)
            if ref() is None and size:
                found.append(Loose(size, frozenset(leaves)))
        return found
