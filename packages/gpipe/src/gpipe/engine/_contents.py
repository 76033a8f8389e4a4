"""The contents of containers, objects, arrays and generators that modules keep in attributes."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from types import MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint._snapshot import CONSTANTS, OF_ANY_MODULE, Slot, may_keep
from ..checkpoint._state import SMALL

_FILLS: dict[type, Callable[[Any, Any], None]] = {
    deque: deque.extend,
    list: list.extend,
    OrderedDict: OrderedDict.update,
    dict: dict.update,
    set: set.update,
}
"""For each type of container, a function that fills it; also for classes derived from it, so in this order."""

_LIBRARIES = sys.stdlib_module_names | {"gpipe", "numpy", "streams", "torch"}
"""Libraries whose objects stay as they are, such as threads and locks."""


class Contents:
    """The attributes of ``modules``, and copies of the contents of containers and objects there."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._seen = {*map(id, modules)}
        self._ways_back: list[Callable[[], object]] = []
        self._tensors: list[tuple[Slot, Tensor, Tensor | None, int]] = []
        for module in filter(may_keep, modules):
            own = {name: value for name, value in vars(module).items() if name not in OF_ANY_MODULE}
            self._ways_back.append(partial(_give, module, own))
            for name, value in own.items():
                if not isinstance(value, Tensor):  # tensors in attributes themselves are handled elsewhere
                    self._take(Slot(module, "attribute", name), value)

    def put_back(self) -> list[Slot]:
        """Give all their old contents. Returns the attributes with tensors that cannot be restored."""
        for way_back in self._ways_back:
            way_back()
        changed = [each for each in self._tensors if each[1]._version != each[3]]
        for _, tensor, copy, _ in changed:
            if copy is not None:
                tensor.copy_(copy)
        return [slot for slot, _, copy, _ in changed if copy is None]

    def _take(self, slot: Slot, value: Any) -> None:
        left = [value]
        while left:
            each = left.pop()
            if type(each) not in CONSTANTS and id(each) not in self._seen:
                self._seen.add(id(each))
                left += self._inside(slot, each)

    def _inside(self, slot: Slot, value: Any) -> Iterable[Any]:
        """Remember how to restore ``value``. Returns its contents."""
        if isinstance(value, Tensor):
            if not value.is_inference():
                copied = value.numel() <= SMALL and not value.requires_grad
                self._tensors.append((slot, value, value.clone() if copied else None, value._version))
            return ()
        rewind = _rewinding(value)
        if rewind is not None:
            self._ways_back.append(rewind)
            return ()
        return [*self._contained(value), *self._attributes(value)]

    def _contained(self, value: Any) -> Iterable[Any]:
        if isinstance(value, tuple):
            return value
        kind = next((kind for kind in _FILLS if isinstance(value, kind)), None)
        if kind is None:
            return ()
        then = [*(kind.items(value) if issubclass(kind, dict) else kind.__iter__(value))]  # type: ignore[attr-defined]
        self._ways_back.append(partial(_refill, kind, value, then))
        values = [each for _, each in then] if issubclass(kind, dict) else then
        return () if CONSTANTS.issuperset(map(type, values)) else values

    def _attributes(self, value: Any) -> Iterable[Any]:
        if not _is_own(value):
            return ()
        found: list[Any] = []
        if type(value).__dictoffset__:
            then = {**vars(value)}
            self._ways_back.append(partial(_give, value, then))
            found += then.values()
        for place in _slots(type(value)):
            filled = _is_filled(place, value)
            own = place.__get__(value) if filled else None
            self._ways_back.append(partial(_set, place, value, filled, own))
            found.append(own)
        return found


def _is_own(value: Any) -> bool:
    """Whether ``value`` is a module, or an object of a class that is in none of the libraries."""
    if isinstance(value, (type, ModuleType)):
        return False
    library = type(value).__module__.partition(".")[0] in _LIBRARIES
    return not library or isinstance(value, (nn.Module, SimpleNamespace))


def _slots(kind: type) -> list[MemberDescriptorType]:
    members = (each for base in kind.__mro__ if "__slots__" in vars(base) for each in vars(base).values())
    return [each for each in members if isinstance(each, MemberDescriptorType)]


def _is_filled(place: MemberDescriptorType, value: Any) -> bool:
    try:
        place.__get__(value)
    except AttributeError:
        return False
    return True


def _set(place: MemberDescriptorType, value: Any, filled: bool, own: Any) -> None:
    if filled:
        place.__set__(value, own)
    elif _is_filled(place, value):
        place.__delete__(value)


def _give(value: Any, then: dict[str, Any]) -> None:
    own = value.__dict__
    for name in own.keys() - then.keys() - OF_ANY_MODULE:
        del own[name]
    own.update(then)


def _refill(kind: Any, value: Any, then: list[Any]) -> None:
    kind.clear(value)
    _FILLS[kind](value, then)


def _rewinding(value: Any) -> Callable[[], object] | None:
    """A function that restores ``value``, if it is an array or a generator."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray) and value.flags.writeable:
        return partial(numpy.copyto, value, value.copy())
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None
