"""The part of the model that a rank keeps: its own stages, on its own devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from streams import has_streams

from ..checkpoint._random import next_seed
from ..module._arguments import Device, parsed_device
from ..module._init import Initializer, Loaded
from ..module._partition import place_partitions
from ._tied import TiedTensor, tied_of

TRANSPORTS = ("auto", "host")

_OF_HOSTS = frozenset({"gloo", "mpi", "fake"})


class Share(NamedTuple):
    """The stages of a rank, and what it shares with others.

    Attributes:
        every: the partitions of all stages; those of other ranks are not moved.
        numbers: the numbers of the stages of this rank.
        partitions, devices: the partition and the device of each of these.
        tied: the tensors of this rank that other ranks have too.
        ties: for each pair of ranks that share tensors, a stage of each that has such a tensor.
    """

    every: list[nn.Module]
    numbers: list[int]
    partitions: nn.ModuleList
    devices: list[torch.device]
    tied: list[TiedTensor]
    ties: list[tuple[int, int]]

    @property
    def device_of(self) -> dict[int, torch.device]:
        """The device of each stage of this rank, by its number."""
        return dict(zip(self.numbers, self.devices, strict=True))

    def told(self, transport: str) -> dict[str, Any]:
        """What a rank tells the others: its stages that are ``trained``, and the ``backends`` of their devices."""
        own = zip(self.numbers, self.partitions, strict=True)
        trained = [j for j, partition in own if any(p.requires_grad for p in partition.parameters())]
        backends = {j: backend_of(device, transport) for j, device in self.device_of.items()}
        return {"trained": trained, "backends": backends}


def own_share(
    every: Sequence[nn.Module],
    ranks: Sequence[int],
    me: int,
    device: Device | Sequence[Device],
    initializer: Initializer | None,
    norm_chunks: int = 0,
) -> Share:
    """Move the partitions of rank ``me``, of ``every`` one, to their devices. After an error no layer has moved."""
    numbers = [j for j, rank in enumerate(ranks) if rank == me]
    own = nn.ModuleList(every[j] for j in numbers)
    places = _places(device, len(own))
    tied, ties = tied_of(every, ranks, me)
    layers = {name: layer for partition in every for name, layer in partition.named_children()}
    # What an initializer draws for the layers of one rank, others must not draw too, nor may their generators differ.
    with torch.random.fork_rng(devices=[], enabled=initializer is not None):
        if initializer is not None and not isinstance(initializer, Loaded):
            torch.manual_seed(next_seed() + me)
        place_partitions(layers, list(own), places, initializer, norm_chunks)
    return Share(list(every), numbers, own, places, tied, ties)


def _places(device: Any, count: int) -> list[torch.device]:
    given = list(device) if isinstance(device, (list, tuple)) else [device] * count
    if len(given) != count:
        raise ValueError(
            f"device: expected one, or one for each of the {count} stages of this rank; got {len(given)}: {device!r}"
        )
    return [parsed_device(each, f"device[{j}]" if given is device else "device") for j, each in enumerate(given)]


def backend_of(device: torch.device, transport: str) -> str | None:
    """The backend of process groups that sends from ``device``, such as ``"nccl"``; None if that is by way of hosts."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}; got {transport!r}")
    if transport == "host" or not has_streams(device):
        return None
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:  # torch has no backend for it
        return None
    return backend if backend not in _OF_HOSTS and dist.is_backend_available(backend) else None
