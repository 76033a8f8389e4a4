"""How many layers each partition gets, so that none costs much more than the others.

All functions give a list for `GPipe`'s ``balance``, the best there is for the costs that they find: no other has a
cheaper most expensive partition. All take

pin: layers at which a partition has to begin,
forbid: layers at which none may begin, so that they stay together with the layer before,

each by name, by a regular expression for the whole name, or by position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from blockpartition import partition, place
from profiler import profile, profile_sizes

Device = torch.device | int | str
Layer = str | re.Pattern[str] | int
Layers = Layer | Iterable[Layer]

__all__ = [
    "balance_by_flops",
    "balance_by_parameters",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "uniform",
]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
    pin: Layers = (),
    forbid: Layers = (),
) -> list[int]:
    """Balances the seconds of forward and backward, measured on copies of the layers for about `timeout` seconds.

    `sample` should have the rows of one micro-batch. It runs on CUDA where there is one, unless `device` says
    otherwise; layers go there one at a time.
    """
    seconds = profile(module, sample, timeout=timeout, device=device).seconds
    return _balance(seconds, partitions, _names(module), pin, forbid)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,  # noqa: A002
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    pin: Layers = (),
    forbid: Layers = (),
) -> list[int]:
    """Balances the bytes of training: what a micro-batch leaves behind, plus the parameters times `param_scale`.

    `input` is a whole mini-batch, of which a micro-batch has the `chunks`-th part. With ``device="meta"`` the bytes are
    counted without running anything.

    `param_scale` is how many times its own size a parameter takes, with gradient and optimizer:

    ===========================  ===========
    optimizer                    param_scale
    ===========================  ===========
    SGD                          2
    SGD(momentum=0.9)            3
    Adagrad                      3
    RMSprop                      3
    RMSprop(momentum=0.9)        4
    RMSprop(centered=True)       4
    Adadelta                     4
    Adam                         4
    AdamW                        4
    Adamax                       4
    NAdam                        4
    RAdam                        4
    Adam(amsgrad=True)           5
    ===========================  ===========
    """
    sizes = profile_sizes(module, input, chunks, param_scale, device)
    return _balance(sizes, partitions, _names(module), pin, forbid)


def balance_by_parameters(
    partitions: int, module: nn.Sequential, *, pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """Balances the bytes of the parameters; needs no sample, and runs nothing."""
    sizes = [sum(parameter.numel() * parameter.itemsize for parameter in layer.parameters()) for layer in module]
    return _balance(sizes, partitions, _names(module), pin, forbid)


def balance_by_flops(
    partitions: int, module: nn.Sequential, sample: Any, *, pin: Layers = (), forbid: Layers = ()
) -> list[int]:
    """Balances the floating-point operations of forward and backward; runs nothing.

    PyTorch counts those of matrix products, convolutions and attention; other layers count as free.
    """
    flops = profile(module, sample, device="meta").costs("flops")
    return _balance(flops, partitions, _names(module), pin, forbid)


def uniform(partitions: int, module: nn.Sequential, *, pin: Layers = (), forbid: Layers = ()) -> list[int]:
    """Balances the number of layers."""
    return _balance([1] * len(module), partitions, _names(module), pin, forbid)


def balance_cost(cost: Sequence[float], partitions: int, *, pin: Layers = (), forbid: Layers = ()) -> list[int]:
    """Balances costs that you know already, one for each layer; a layer is named by its position.

    >>> balance_cost([1, 2, 3, 4, 5, 6], 2)
    [4, 2]
    >>> balance_cost([1, 2, 3, 4, 5, 6], 2, forbid=4)
    [5, 1]
    """
    return _balance(cost, partitions, [str(i) for i in range(len(cost))], pin, forbid)


def _balance(cost: Sequence[float], partitions: int, names: list[str], pin: Layers, forbid: Layers) -> list[int]:
    pinned, forbidden = _cuts(pin, names, "pin"), _cuts(forbid, names, "forbid")
    if not pinned and not forbidden:
        return list(partition(cost, partitions).sizes)
    return list(place(cost, partitions, pin=pinned, forbid=forbidden).sizes)


def _names(module: nn.Sequential) -> list[str]:
    return list(module._modules)


def _cuts(layers: Layers, names: list[str], argument: str) -> list[int]:
    """The positions that are meant; the first layer begins a partition anyhow."""
    wanted = [layers] if isinstance(layers, (str, re.Pattern, int)) else layers
    return sorted({position for layer in wanted for position in _positions(layer, names, argument)} - {0})


def _positions(layer: Layer, names: list[str], argument: str) -> list[int]:
    positions = [i for i, name in enumerate(names) if _is_meant(layer, i, name)]
    if not positions:
        raise ValueError(f"{argument}: {layer!r} is no layer; there are {', '.join(names)}")
    return positions


def _is_meant(layer: Layer, position: int, name: str) -> bool:
    if isinstance(layer, int):
        return layer == position
    return layer == name or re.fullmatch(layer, name) is not None
