"""Where partitions have to begin, or must not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from blockpartition import partition, place

Layer = str | re.Pattern[str] | int
Layers = Layer | Iterable[Layer]


class Cuts(NamedTuple):
    """Positions at which a partition has to begin, or must not."""

    pin: list[int]
    forbid: list[int]


def balanced(cost: Sequence[float], partitions: int, cuts: Cuts) -> list[int]:
    """The layers of each partition, so that the most expensive one costs the least."""
    if not any(cuts):
        return list(partition(cost, partitions).sizes)
    return list(place(cost, partitions, pin=cuts.pin, forbid=cuts.forbid).sizes)


def checked_cuts(partitions: int, module: nn.Sequential, pin: Layers, forbid: Layers) -> Cuts:
    """The cuts, if there is any balance with them: nobody should wait for a measurement to learn of a mistake."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module: expected nn.Sequential, got {type(module).__name__}; wrap the layers in one")
    cuts = read_cuts(list(module._modules), pin, forbid)
    balanced([1] * len(module), partitions, cuts)
    return cuts


def read_cuts(names: list[str], pin: Layers, forbid: Layers) -> Cuts:
    """The positions of the layers that are meant, which have these ``names``."""
    return Cuts(_cuts(pin, names, "pin"), _cuts(forbid, names, "forbid"))


def _cuts(layers: Layers, names: list[str], argument: str) -> list[int]:
    """The positions that are meant; the first layer begins a partition anyhow."""
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
