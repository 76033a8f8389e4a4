"""The layer for which the bytes of a shared parameter are counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import torch
from torch import nn

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


class Owned(NamedTuple):
    """The parameters and buffers of a layer, without those that an earlier layer has too."""

    parameters: list[nn.Parameter]
    buffers: list[torch.Tensor]


def owned(layers: Iterable[nn.Module]) -> list[Owned]:
    """What each layer owns: a tensor that several layers share belongs to the first, so sums count it once."""
    seen: set[int] = set()
    return [Owned(_fresh(layer.parameters(), seen), _fresh(layer.buffers(), seen)) for layer in layers]


def _fresh(tensors: Iterable[_Tensor], seen: set[int]) -> list[_Tensor]:
    fresh = [tensor for tensor in tensors if id(tensor) not in seen]
    seen.update(map(id, fresh))
    return fresh
