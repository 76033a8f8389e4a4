"""Sources of state dicts, which are read layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """State dicts that need not be in memory.

    Attributes:
        where: what it is called in errors.
    """

    where: str

    def groups(self) -> Mapping[str, Any]:
        """For each mapping in it, what stands before its names, ``""`` if nothing: its ``_metadata``."""

    def shapes(self) -> Mapping[str, torch.Size | None]:
        """Of each entry by its name; None for one that is no tensor."""

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """The entries with these names; the source keeps no reference to them."""


class Entries:
    """A mapping, perhaps of mappings, whose values may be made when they are asked for."""

    def __init__(self, entries: Mapping[str, Any], where: str = "the state dict") -> None:
        self.where = where
        self._groups: dict[str, Any] = {}
        self._shapes: dict[str, torch.Size | None] = {}
        self._places: dict[str, tuple[Mapping[str, Any], Any]] = {}
        self._enter(entries, "")

    def _enter(self, entries: Mapping[str, Any], prefix: str) -> None:
        self._groups[prefix] = getattr(entries, "_metadata", None)
        for key in entries:
            name, value = f"{prefix}{key}", entries[key]
            # What a module gives as its extra state may be a mapping too.
            if isinstance(value, Mapping) and not name.endswith("_extra_state"):
                self._enter(value, f"{name}.")
            else:
                self._shapes[name] = value.shape if isinstance(value, Tensor) else None
                self._places[name] = entries, key

    def groups(self) -> Mapping[str, Any]:
        return self._groups

    def shapes(self) -> Mapping[str, torch.Size | None]:
        return self._shapes

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        places = {name: self._places[name] for name in names}
        return {name: entries[key] for name, (entries, key) in places.items()}


class Group:
    """One of the mappings of a source, by its own names."""

    def __init__(self, source: Source, prefix: str) -> None:
        self.where = f"{source.where}, in {prefix[:-1]!r}," if prefix else source.where
        self.metadata = source.groups().get(prefix)
        self._source = source
        self._prefix = prefix
        self._shapes = {
            name[len(prefix) :]: shape for name, shape in source.shapes().items() if name.startswith(prefix)
        }

    def shapes(self) -> Mapping[str, torch.Size | None]:
        return self._shapes

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        found = self._source.read([self._prefix + name for name in names])
        return {name[len(self._prefix) :]: value for name, value in found.items()}


def group_with(source: Source, names: Iterable[str]) -> Group:
    """The part of ``source`` that has ``names``: of a checkpoint of more than a model, the model.

    Raises:
        ValueError: several have.
    """
    wanted, there = list(names), source.shapes()
    found = [prefix for prefix in source.groups() if any(prefix + name in there for name in wanted)]
    if len(found) > 1 and "" not in found:
        raise ValueError(
            f"init: {source.where} has names of the model in {' and in '.join(repr(p[:-1]) for p in found)}; give the "
            "state dict itself, init=checkpoint[...]"
        )
    return Group(source, "" if not found or "" in found else found[0])
