"""Layers that compute together with other processes: ``nn.SyncBatchNorm``, and layers whose parameters are sharded.

Their collectives match if the layer's group consists of the processes with the same stages, one of each replica.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

Groups = set[dist.ProcessGroup]


def synced_layers(module: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)}


def synced_over(layers: dict[str, nn.SyncBatchNorm]) -> dict[str, Groups]:
    """The process groups over which any of ``layers`` communicates in training, by name."""
    found = {name: layer.process_group or dist.group.WORLD for name, layer in layers.items() if layer.training}
    return {name: {group} for name, group in found.items() if group is not None}


def sharded_over(module: nn.Module) -> dict[str, Groups]:
    """The process groups over which parameters are sharded at the moment, by name."""
    if "torch.distributed.tensor" not in sys.modules:  # finding the names takes time
        return {}
    named: Any = module.named_parameters()
    return {name: {*p.device_mesh.get_all_groups()} for name, p in named if hasattr(p, "device_mesh")}


def expect_parallel(found: dict[str, Groups], members: Sequence[int]) -> None:
    """Raise ValueError if a layer would wait forever for a rank of the pipe that has other stages.

    Args:
        found: the process groups over which layers communicate, by the names of layers or parameters.
        members: the processes of the pipe, in the world.
    """
    me = dist.get_rank()
    for name, groups in found.items():
        others = {other for group in groups for other in dist.get_process_group_ranks(group)} - {me}
        if others.intersection(members):
            raise ValueError(
                f"{name!r} computes over a group with rank {min(others.intersection(members))}, which has other stages "
                "of this pipe and never comes to it; give it the processes with the same stages, as "
                'fully_shard(..., mesh=mesh["replicas"]), or nn.SyncBatchNorm(..., '
                'process_group=mesh["replicas"].get_group())'
            )
