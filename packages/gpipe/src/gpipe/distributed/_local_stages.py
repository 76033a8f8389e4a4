"""The partitions that a rank keeps, on its own devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from streams import has_streams

from ..checkpoint._random import next_seed
from ..module._arguments import Device, parse_device
from ..module._init import Initializer, Loaded
from ..module._partition import place_partitions
from ._tied import TiedTensor, find_tied

TRANSPORTS = ("auto", "host")

_OF_HOSTS = frozenset({"gloo", "mpi", "fake"})


class LocalStages(NamedTuple):
    """The stages of a rank, and the tensors that it shares with other ranks.

    Attributes:
        every: the partitions of all stages. The partitions of other ranks are not moved.
        numbers: the indices of this rank's stages.
        partitions, devices: the partition and the device of each of this rank's stages.
        tied: the tensors of this rank that other ranks also have.
        ties: for each pair of ranks that share tensors, two stages with such a tensor, one on each rank.
    """

    every: list[nn.Module]
    numbers: list[int]
    partitions: nn.ModuleList
    devices: list[torch.device]
    tied: list[TiedTensor]
    ties: list[tuple[int, int]]

    @property
    def device_of(self) -> dict[int, torch.device]:
        """The device of each stage of this rank, by stage index."""
        return dict(zip(self.numbers, self.devices, strict=True))

    def report(self, transport: str) -> dict[str, Any]:
        """Return the report for other ranks: the stages that are ``trained``, and the ``backends`` of all devices."""
        own = zip(self.numbers, self.partitions, strict=True)
        trained = [j for j, partition in own if any(p.requires_grad for p in partition.parameters())]
        backends = {j: find_backend(device, transport) for j, device in self.device_of.items()}
        return {"trained": trained, "backends": backends}


def local_stages(
    every: Sequence[nn.Module],
    ranks: Sequence[int],
    me: int,
    device: Device | Sequence[Device],
    initializer: Initializer | None,
    norm_chunks: int = 0,
    *,
    offload: bool = False,
) -> LocalStages:
    """Move the partitions of rank ``me`` to their devices. If an error is raised, no layer has moved.

    Args:
        every: the partitions of all stages.
        ranks: the rank of each stage.
        me: this rank.
        device: the device of this rank's stages, or a list with one device per stage.
        initializer: initializes the layers, if any.
        norm_chunks: convert batch norms to deferred ones with this number of micro-batches; 0 to keep them.
        offload: whether parameters are moved to the host instead.
    """
    numbers = [j for j, rank in enumerate(ranks) if rank == me]
    own = nn.ModuleList(every[j] for j in numbers)
    places = _places(device, len(own))
    tied, ties = find_tied(every, ranks, me)
    layers = {name: layer for partition in every for name, layer in partition.named_children()}
    # Ranks must initialize their layers from different random numbers, but keep equal default generators.
    with torch.random.fork_rng(devices=[], enabled=initializer is not None):
        if initializer is not None and not isinstance(initializer, Loaded):
            torch.manual_seed(next_seed() + me)
        place_partitions(layers, list(own), places, initializer, norm_chunks, offload=offload)
    return LocalStages(list(every), numbers, own, places, tied, ties)


def _places(device: Any, count: int) -> list[torch.device]:
    given = list(device) if isinstance(device, (list, tuple)) else [device] * count
    if len(given) != count:
        raise ValueError(
            f"device: expected one device, or {count}, one for each stage of this rank; got {len(given)}: {device!r}"
        )
    return [parse_device(each, f"device[{j}]" if given is device else "device") for j, each in enumerate(given)]


def find_backend(device: torch.device, transport: str) -> str | None:
    """Return the process group backend that sends from ``device``, such as ``"nccl"``; None to use host memory."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(map(repr, TRANSPORTS))}; got {transport!r}")
    if transport == "host" or not has_streams(device):
        return None
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:  # torch has no backend for it
        return None
    return backend if backend not in _OF_HOSTS and dist.is_backend_available(backend) else None
