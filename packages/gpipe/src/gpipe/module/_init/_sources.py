"""Where a state dict comes from, to be read a layer at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """A state dict that need not be in memory.

    Attributes:
        where: what it is called in errors.
        metadata: as ``state_dict()._metadata``: versions of modules.
    """

    where: str
    metadata: Any

    def shapes(self) -> Mapping[str, torch.Size | None]:
        """Of each entry by its name; None for one that is no tensor."""

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """These entries."""

    def inside(self, names: Iterable[str]) -> Source:
        """The part of it that has these names, without what is before them: of a checkpoint, the model."""


class Entries:
    """A mapping, whose values may be made when they are asked for, and then are not kept."""

    def __init__(self, entries: Mapping[str, Any], where: str = "the state dict") -> None:
        self.where = where
        self.metadata = getattr(entries, "_metadata", None)
        self._entries = entries
        self._shapes = {name: shape_of(entries[name]) for name in entries}

    def shapes(self) -> Mapping[str, torch.Size | None]:
        return self._shapes

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._entries[name] for name in names}

    def inside(self, names: Iterable[str]) -> Source:
        return self


def shape_of(entry: Any) -> torch.Size | None:
    return entry.shape if isinstance(entry, Tensor) else None
