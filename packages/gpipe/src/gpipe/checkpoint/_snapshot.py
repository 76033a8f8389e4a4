"""The values of parameters, buffers and attributes of modules at one moment, for comparison with a later one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn


class _Absent:
    """There is no value."""


ABSENT: Final = _Absent()


class Slot(NamedTuple):
    """The place of a value in a module: its parameters, its buffers, or its own attributes."""

    owner: nn.Module
    kind: str
    name: str

    @property
    def values(self) -> dict[str, Any]:
        """The dict that contains the value."""
        own = vars(self.owner)
        return own if self.kind == "attribute" else own[self.kind]

    @property
    def value(self) -> Any:
        """The current value; ``ABSENT`` if there is none."""
        return self.values.get(self.name, ABSENT)

    @value.setter
    def value(self, value: Any) -> None:
        if value is ABSENT:
            self.values.pop(self.name, None)
        else:
            self.values[self.name] = value


class Sight:
    """The values in some slots at one moment.

    Args:
        slots: the same list object as long as no name was added or removed.
        values: the value of each slot, in order.
        versions: the version counter of each tensor; 0 for other values.
    """

    __slots__ = ("slots", "values", "versions")

    def __init__(self, slots: list[Slot], values: list[Any], versions: list[int]) -> None:
        self.slots = slots
        self.values = values
        self.versions = versions

    def moved(self, later: Sight) -> list[Slot]:
        """The slots that have another value in ``later``, or a tensor that was changed in place."""
        if self.slots is later.slots and self.versions == later.versions and all(map(is_, self.values, later.values)):
            return []
        old, new = self._seen(), later._seen()
        return [slot for slot in {**old, **new} if old.get(slot) != new.get(slot)]

    def value(self, slot: Slot) -> Any:
        """The value in ``slot``; ``ABSENT`` if there was none."""
        return self.values[self.slots.index(slot)] if slot in self.slots else ABSENT

    def _seen(self) -> dict[Slot, tuple[int, int]]:
        return {
            slot: (id(value), version)
            for slot, value, version in zip(self.slots, self.values, self.versions, strict=True)
        }


class View:
    """Reads all parameters and buffers of some modules, and the attributes that layers may change.

    Args:
        modules: the modules, in order.
        ignored: those of which only parameters are read.
        sharded: those of which parameters are not read.

    Attributes:
        parameters: the number of slots with parameters; they come first.
    """

    def __init__(
        self, modules: Sequence[nn.Module], ignored: Iterable[nn.Module], sharded: Iterable[nn.Module] = ()
    ) -> None:
        unseen, unlike = {*ignored}, {*sharded}
        seen = [module for module in modules if module not in unseen]
        self._registered = [(module, "_parameters") for module in modules if module not in unlike]
        self._registered += [(module, "_buffers") for module in seen]
        self._changing = [module for module in seen if may_keep(module)]
        self._index()

    def look(self) -> Sight:
        """The current values."""
        if not (any(self._empty) or self._sizes != list(map(len, self._filled))):
            # The index may be out of date even so: another name replaced one (KeyError), or None a tensor or the other
            # way round (AttributeError, KeyError). Then it is made again; an error that is left is raised below.
            try:
                return self._look()
            except (KeyError, AttributeError):
                pass
        self._index()
        return self._look()

    def _look(self) -> Sight:
        values: list[Any] = [own[name] for own, name in self._tensors]
        versions = [value._version for value in values]
        if self._attributes:
            found = [own[name] for own, name in self._attributes]
            values += found
            versions += [value._version if isinstance(value, Tensor) else 0 for value in found]
        if self._nothing:
            if any(own[name] is not None for own, name in self._nothing):
                raise KeyError
            values += [None] * len(self._nothing)
            versions += [0] * len(self._nothing)
        return Sight(self._slots, values, versions)

    def _index(self) -> None:
        registered = [Slot(owner, kind, name) for owner, kind in self._registered for name in vars(owner)[kind]]
        tensors = [slot for slot in registered if slot.value is not None]
        nothing = [slot for slot in registered if slot.value is None]
        attributes = [
            Slot(owner, "attribute", name)
            for owner in self._changing
            for name, value in vars(owner).items()
            if name not in OF_ANY_MODULE and _is_state(value)
        ]
        self.parameters = sum(slot.kind == "_parameters" for slot in tensors)
        self._slots = [*tensors, *attributes, *nothing]
        self._tensors, self._attributes, self._nothing = map(_places, (tensors, attributes, nothing))
        dicts = [vars(owner)[kind] for owner, kind in self._registered]
        self._empty = [own for own in dicts if not own]
        self._filled = [own for own in dicts if own] + [vars(owner) for owner in self._changing]
        self._sizes = list(map(len, self._filled))


def _places(slots: Iterable[Slot]) -> list[tuple[dict[str, Any], str]]:
    return [(slot.values, slot.name) for slot in slots]


OF_ANY_MODULE = frozenset(vars(nn.Module()))
"""The names of attributes that every module has."""

CONSTANTS = frozenset([type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device])
"""Types whose values cannot change."""


def may_keep(module: nn.Module) -> bool:
    """Whether ``module`` may change attributes in its forward. Modules of torch do not, unless they have hooks."""
    return not type(module).__module__.startswith("torch.nn.modules.") or bool(
        module._forward_hooks or module._forward_pre_hooks
    )


def _is_state(value: object) -> bool:
    """Whether ``value`` can be restored."""
    if isinstance(value, Tensor):
        return not value.is_inference()
    return type(value) in CONSTANTS or (type(value) is tuple and all(map(_is_state, value)))
