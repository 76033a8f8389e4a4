"""Place parameters that partitions share, and reject modules that cannot be shared."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..engine._offloaded import pin
from ..engine._tied import holds_tensors
from ..transport._copy import can_pin
from ..values._leaves import storage_id
from ._devices import move, move_to_host
from ._partitioned import PartitionedModule

_log = logging.getLogger("gpipe")


def move_all(partitions: Sequence[nn.Module], places: Sequence[torch.device], *, offload: bool = False) -> None:
    """Move each partition to its device. Shared tensors are moved to the device of their first partition.

    With ``offload``, parameters are moved to the host instead.
    """
    # The first partition is moved last, so that the tensors it shares stay on its device.
    for partition, place in reversed(list(zip(partitions, places, strict=True))):
        (move_to_host if offload else move)(partition, place)
    if offload:
        pin_parameters(partitions, places)


def pin_parameters(partitions: Iterable[nn.Module], places: Iterable[torch.device]) -> None:
    """Pin the parameters of partitions on accelerators; if the system refuses, log a warning and leave the rest."""
    try:
        for partition, place in zip(partitions, places, strict=True):
            if can_pin(place.type):
                pin([*partition.parameters()])
    except RuntimeError as error:
        _log.warning(
            "the system pins no more memory (%s); parameters outside of pinned memory are loaded more slowly, and not "
            "while stages compute",
            str(error).partition("\n")[0],
        )


def expect_shareable(partitions: Sequence[nn.Module], places: Sequence[torch.device]) -> None:
    """Raise ValueError if ``partitions`` share a module or tensor that cannot be copied to each of their devices."""
    _expect_copyable(partitions)
    at: dict[Tensor, tuple[int, str]] = {}
    for j, partition in enumerate(partitions):
        for name, tensor in chain(partition.named_parameters(), partition.named_buffers()):
            if at.setdefault(tensor, (j, name))[0] != j and is_lazy(tensor):
                raise ValueError(
                    f"{name!r} of partition {j} is shared with another partition and has no shape yet; call the model "
                    "once, with a sample, before creating a pipe from it"
                )
    _expect_whole(at, ["cpu" if place.type == "cpu" else str(place) for place in places])


def _expect_copyable(partitions: Sequence[nn.Module]) -> None:
    """Raise ValueError if a shared module is a pipe, is recurrent, or has a ``forward`` that was set on the instance.

    A shallow copy of such a module would still use the original parameters.
    """
    at: dict[nn.Module, tuple[int, str]] = {}
    for j, partition in enumerate(partitions):
        for name, module in partition.named_modules():
            first, its = at.setdefault(module, (j, name))
            if first == j or not holds_tensors(module):
                continue
            both = f"{name!r} of partition {j} is also {its!r} of partition {first}, but it"
            if isinstance(module, PartitionedModule) or "forward" in vars(module):
                raise ValueError(
                    f"{both} is a pipe, or its forward was set on the instance, for example by torch.compile, so it is "
                    "bound to a single set of parameters; put both into one partition, or compile the layers around it"
                )
            # Its forward rebuilds these lists if the weights have changed, as they have in a copy.
            if isinstance(module, nn.RNNBase):
                raise ValueError(
                    f"{both} is of class {type(module).__name__}, which keeps lists of its parameters; put both into "
                    "one partition, or create a separate layer for each partition and tie all weights, as in "
                    "b.weight_ih_l0 = a.weight_ih_l0"
                )


def _expect_whole(at: Mapping[Tensor, tuple[int, str]], devices: Sequence[str]) -> None:
    """Raise ValueError if tensors on several devices share memory, but are not the same object: they would diverge.

    Args:
        at: maps each tensor to its first partition, and its name there.
    """
    if len(set(devices)) < 2:
        return
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in at:
        if not is_lazy(tensor):
            by_storage.setdefault(storage_id(tensor), []).append(tensor)
    for cluster in by_storage.values():
        if any(tensor.requires_grad for tensor in cluster) and len({devices[at[tensor][0]] for tensor in cluster}) > 1:
            found = [at[tensor] for tensor in cluster]
            names = " and ".join(f"{name!r} of partition {j} on {devices[j]!r}" for j, name in found)
            raise ValueError(
                f"{names} share memory without being the same parameter, and cannot share it across devices; assign "
                "the parameter itself (head.weight = embedding.weight), or put them on the same device"
            )
