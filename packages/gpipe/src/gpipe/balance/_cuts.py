"""The layers at which partitions have to begin, and those at which none may."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from blockpartition import partition, place

Layer = str | re.Pattern[str] | int
Layers = Layer | Iterable[Layer]


class Cuts(NamedTuple):
    """Positions at which a partition has to begin, and those at which none may."""

    pin: list[int]
    forbid: list[int]


def balanced(cost: Sequence[float], partitions: int, cuts: Cuts) -> list[int]:
    """The layers of each partition, so that the most expensive one costs the least."""
    if not any(cuts):
        return list(partition(cost, partitions).sizes)
    return list(place(cost, partitions, pin=cuts.pin, forbid=cuts.forbid).sizes)


def checked_cuts(partitions: int, module: nn.Sequential, pin: Layers, forbid: Layers) -> Cuts:
    """The cuts, checked before anything is measured: there must be a balance that satisfies them."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module: expected nn.Sequential, got {type(module).__name__}; wrap the layers in one")
    cuts = read_cuts(list(module._modules), pin, forbid)
    balanced([1] * len(module), partitions, cuts)
    return cuts


def read_cuts(names: list[str], pin: Layers, forbid: Layers) -> Cuts:
    """The positions of layers given by name, regular expression or position; ``names`` are those of all layers."""
    return Cuts(_cuts(pin, names, "pin"), _cuts(forbid, names, "forbid"))


def _cuts(layers: Layers, names: list[str], argument: str) -> list[int]:
    """The positions of ``layers``, without that of the first layer, at which a partition begins anyway."""
    wanted = [layers] if isinstance(layers, (str, re.Pattern, int)) else layers
    return sorted({position for layer in wanted for position in _positions(layer, names, argument)} - {0})


def _positions(layer: Layer, names: list[str], argument: str) -> list[int]:
    positions = [i for i, name in enumerate(names) if _is_meant(layer, i, name)]
    if not positions:
        raise ValueError(f"{argument}: {layer!r} is not a layer; the layers are {', '.join(names)}")
    return positions


def _is_meant(layer: Layer, position: int, name: str) -> bool:
    if isinstance(layer, int):
        return layer == position
    return layer == name or re.fullmatch(layer, name) is not None
