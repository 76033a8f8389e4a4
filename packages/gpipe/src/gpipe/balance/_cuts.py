"""The layers at which partitions have to begin, and those at which none may."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from blockpartition import partition, place

Layers = Iterable[str | int]
"""Layers by name or position."""


def balanced(
    cost: Sequence[float], partitions: int, names: Sequence[str], pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """The layers of each partition, so that the most expensive one costs the least."""
    pinned, forbidden = _positions(pin, names, "pin"), _positions(forbid, names, "forbid")
    if not pinned and not forbidden:  # then the more even one of the optima is known too
        return list(partition(cost, partitions).sizes)
    return list(place(cost, partitions, pin=pinned, forbid=forbidden).sizes)


def checked_names(partitions: int, module: nn.Sequential, pin: Layers, forbid: Layers) -> list[str]:
    """The names of the layers, after a check that there is a balance."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module: expected nn.Sequential, got {type(module).__name__}; wrap the layers in one")
    # Positions are those of children, also of one that stands in two places.
    names = list(module._modules)
    balanced([1] * len(names), partitions, names, pin, forbid)
    return names


def _positions(layers: Layers, names: Sequence[str], argument: str) -> list[int]:
    """The positions of ``layers``, without that of the first layer, at which a partition begins anyway."""
    if isinstance(layers, (str, int)):
        raise TypeError(f"{argument}: expected a list of layers, got {layers!r}; write [{layers!r}]")
    found = {names.index(layer) if layer in names else layer for layer in layers}
    for layer in found:
        if not isinstance(layer, int) or not 0 <= layer < len(names):
            raise ValueError(f"{argument}: {layer!r} is not a layer; the layers are {', '.join(names)}")
    return sorted(found - {0})  # type: ignore[arg-type]
