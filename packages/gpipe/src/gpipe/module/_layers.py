"""The layers of a pipe are in the pipe and in its partitions. Here both are changed together, or neither."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Change = Callable[[str, Any], None]
"""A function that sets a value under a name wherever it is kept; None removes it. It may refuse."""

_MISSING = object()


class Held(dict[str, Any]):
    """A dict of what a module registers, in which every change is made by ``change()``.

    All ways to change a module end here: attributes, ``add_module``, ``append``, ``del``, ``_modules[name] = ...``.

    Args:
        entries: the present entries.
        change: a weak reference to the function; when it is dead, this is an ordinary dict.
    """

    def __init__(self, entries: dict[str, Any], change: Callable[[], Change | None]) -> None:
        super().__init__(entries)
        self._change = change

    @property
    def owned(self) -> bool:
        return self._change() is not None

    def put(self, name: str, value: Any) -> None:
        """Change an entry without calling ``change``."""
        super().__setitem__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        change = self._change()
        if change is not None and name not in self:
            raise TypeError(f"{name!r} cannot be added to a pipe, which computes the layers that it was made of{ADD}")
        (change or self.put)(name, value)

    def __delitem__(self, name: str) -> None:
        change = self._change()
        if change is not None and name in self:
            change(name, None)
        super().__delitem__(name)

    def pop(self, name: str, default: Any = _MISSING) -> Any:
        if name not in self and default is not _MISSING:
            return default
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __ior__(self, other: Any) -> Held:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are ordinary dicts; a copy of the owner makes its own."""
        return dict, (dict(self),)


def refill(partitions: Iterable[nn.Module], others: Iterable[nn.Module]) -> None:
    """Give each of the ``partitions`` the layers of one of the ``others``, without calling ``change``."""
    for partition, other in zip(partitions, others, strict=True):
        if [*partition._modules] != [*other._modules]:  # otherwise equal; a run may be iterating over them
            dict.clear(partition._modules)
        dict.update(partition._modules, other._modules)


def refuse(name: str, _: object) -> None:
    """A :data:`Change` that refuses: entries of a partition besides its layers would not be trained or saved."""
    raise TypeError(
        f"{name!r} of the partitions of a pipe cannot be changed: they are a view of its layers; change a layer by "
        f"pipe[index] = layer, register what it needs on the layer{NEW_PIPE}"
    )


def refuse_more(layers: dict[str, Any]) -> None:
    """Raise TypeError if ``layers`` are those of a pipe, to which none can be added."""
    if isinstance(layers, Held) and layers.owned:
        raise TypeError(f"no layer can be added to a partition of a pipe; replace one by pipe[index] = layer{NEW_PIPE}")


def expect_replacement(name: str, layer: object) -> nn.Module:
    """``layer``, if it may be put in the place of the one called ``name``."""
    if isinstance(layer, nn.Module):
        return layer
    given = "not taken away" if layer is None else f"got {type(layer).__name__}"
    raise TypeError(f"layer {name!r} of a pipe can be replaced by another module only; {given}{NEW_PIPE}")


NEW_PIPE = "; for other layers make a new pipe: GPipe(nn.Sequential(...), balance=...)"
ADD = f"; put it into a layer, or into a module around the pipe{NEW_PIPE}"
