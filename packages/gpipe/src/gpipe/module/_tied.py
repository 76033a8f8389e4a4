"""Parameters that partitions share: the device they are on, and what cannot be shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..engine._tied import holds_tensors, modules_below, shared_tensors
from ..values._memory import clusters
from ._devices import move
from ._divided import Divided


def move_all(partitions: Sequence[nn.Module], places: Sequence[torch.device]) -> None:
    """Move each partition to its place. What several partitions share is moved to that of the first one."""
    holders = _holders(partitions)
    for partition, place in reversed(list(zip(partitions, places, strict=True))):
        move(partition, place)
    for (first, name), *others in holders.values():
        for entries, other in others:  # moved to a device of another type, a parameter may be a new one
            entries[other] = first[name]


def _holders(partitions: Sequence[nn.Module]) -> dict[Tensor, list[tuple[dict[str, Any], str]]]:
    """The places of each parameter in modules, in the order of the ``partitions``."""
    holders: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
    for module in (module for partition in partitions for module in partition.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module._parameters, name))
    return holders


def expect_shareable(partitions: Sequence[nn.Module], places: Sequence[torch.device]) -> None:
    """Raise ValueError, naming it, if ``partitions`` share something of which each cannot have a copy."""
    _expect_initialised(partitions)
    _expect_copyable(partitions)
    _expect_whole(partitions, places)


def _expect_initialised(partitions: Sequence[nn.Module]) -> None:
    shared = shared_tensors([modules_below(partition) for partition in partitions])
    for j, partition in enumerate(partitions):
        for name, tensor in _state(partition):
            if id(tensor) in shared and is_lazy(tensor):
                raise ValueError(
                    f"{name!r} of partition {j} is shared with another partition and has no shape yet; call the model "
                    "once, with a sample, before you make a pipe of it"
                )


def _expect_copyable(partitions: Sequence[nn.Module]) -> None:
    """Modules in several partitions are copied shallowly. A copy would not be used by what is bound to the module
    itself.
    """
    earlier: dict[nn.Module, str] = {}
    for j, partition in enumerate(partitions):
        for name, module in partition.named_modules():
            problem = _binding(module) if module in earlier and holds_tensors(module) else None
            if problem is not None:
                raise ValueError(f"{name!r} of partition {j} is {earlier[module]} too, {problem}")
        earlier |= {module: f"{name!r} of partition {j}" for name, module in partition.named_modules()}


def _binding(module: nn.Module) -> str | None:
    """Why a shallow copy of ``module`` would compute with the tensors of ``module``; None if it would not."""
    if isinstance(module, Divided):
        return _IS_A_PIPE
    return _HAS_FORWARD if "forward" in vars(module) else None


_HAS_FORWARD = (
    "and its forward was set on the instance, as torch.compile does, so that it knows one set of parameters only; put "
    "both into one partition, or compile the layers around it"
)
_IS_A_PIPE = "and it is a pipe, which has its own places; put both into one partition"


def _expect_whole(partitions: Sequence[nn.Module], places: Sequence[torch.device]) -> None:
    """Tensors that share memory without being one would become separate on several devices, and be trained apart."""
    devices = ["cpu" if place.type == "cpu" else str(place) for place in places]
    if len(set(devices)) < 2:
        return
    at: dict[Tensor, tuple[int, str]] = {}
    for j, partition in enumerate(partitions):
        for name, tensor in _state(partition):
            at.setdefault(tensor, (j, name))
    for cluster in clusters([tensor for tensor in at if not is_lazy(tensor)]):
        if any(tensor.requires_grad for tensor in cluster) and len({devices[at[tensor][0]] for tensor in cluster}) > 1:
            found = [at[tensor] for tensor in cluster]
            names = " and ".join(f"{name!r} of partition {j} on {devices[j]!r}" for j, name in found)
            raise ValueError(
                f"{names} share memory without being one parameter, which they would not on several devices; assign "
                "the parameter itself (head.weight = embedding.weight), or put them on one device"
            )


def _state(partition: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from partition.named_parameters()
    yield from partition.named_buffers()
