"""Refuse wrappers that treat the processes of a pipe as replicas of one model.

They would give all ranks the weights of one of them, or average gradients of different stages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn


class Wrapped:
    """Raises a TypeError when ``DistributedDataParallel`` reads it, as the set of parameters that it shall ignore."""

    def __init__(self, rank: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        _refuse("DistributedDataParallel(rank), which accelerator.prepare(rank) also creates,")


def expect_unwrapped(kind: type) -> None:
    """Raise TypeError if ``kind`` is the class of a rank that ``fully_shard`` is applied to."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is not None and issubclass(kind, sharded):
        _refuse("fully_shard(rank)", _SHARDED)


def expect_plain(module: nn.Module) -> None:
    """Raise TypeError if ``module`` or a part of it is wrapped in ``FullyShardedDataParallel``."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    for name, part in module.named_modules() if kind is not None else ():
        if isinstance(part, kind):
            raise TypeError(
                f"module: {repr(name) if name else 'it'} is wrapped in FullyShardedDataParallel, whose flat parameters "
                "cannot be split into stages; pass the plain model, and call "
                'fully_shard(partition, mesh=mesh["replicas"]) for each of rank.partitions'
            )


def _get_managed(rank: Any) -> Any:
    raise AttributeError


def _manage(rank: Any, value: object) -> NoReturn:
    if any(hasattr(parameter, "device_mesh") for parameter in rank.parameters()):
        _refuse("fully_shard(rank)", _SHARDED)
    _refuse("FullyShardedDataParallel(rank)")


managed_by_fsdp = property(_get_managed, _manage)
"""An attribute that a rank has not, and that raises a TypeError when a wrapper sets it."""

_SHARDED = "; its parameters are sharded already, so create a new Rank"


def _refuse(what: str, more: str = "") -> NoReturn:
    raise TypeError(
        f"{what} is not supported: the processes of a pipe have different stages, and it would treat them as copies of "
        "one model. Use the rank itself, as in rank.step(x, y, loss_fn=loss_fn). To train several pipes, pass "
        'Rank(..., group=mesh["stages"], replicas=mesh["replicas"]); to shard the stages over them, call '
        f'fully_shard(partition, mesh=mesh["replicas"]) for each of rank.partitions{more}'
    )
