"""Find layers that run collectives in their forward: ``nn.SyncBatchNorm`` and layers with sharded parameters.

Their collectives match if the layer's group consists of the processes with the same stages, one per replica.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

Groups = set[dist.ProcessGroup]


def find_synced_layers(module: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)}


def find_sync_groups(layers: dict[str, nn.SyncBatchNorm]) -> dict[str, Groups]:
    """Return the process groups, by layer name, that layers in training mode communicate over."""
    found = {name: layer.process_group or dist.group.WORLD for name, layer in layers.items() if layer.training}
    return {name: {group} for name, group in found.items() if group is not None}


def find_shard_groups(module: nn.Module) -> dict[str, Groups]:
    """Return the process groups, by parameter name, that parameters are currently sharded over."""
    if "torch.distributed.tensor" not in sys.modules:  # listing the parameters takes time
        return {}
    named: Any = module.named_parameters()
    return {name: {*p.device_mesh.get_all_groups()} for name, p in named if hasattr(p, "device_mesh")}


def expect_parallel(found: dict[str, Groups], members: Sequence[int]) -> None:
    """Raise ValueError if a layer would deadlock, waiting for a rank of the pipe that has different stages.

    Args:
        found: the process groups that layers communicate over, by the name of a layer or parameter.
        members: the global ranks of the pipe's processes.
    """
    me = dist.get_rank()
    for name, groups in found.items():
        others = {other for group in groups for other in dist.get_process_group_ranks(group)} - {me}
        if others.intersection(members):
            raise ValueError(
                f"{name!r} computes over a group with rank {min(others.intersection(members))}, which has different "
                "stages of this pipe and never runs this layer; use a group of the processes with the same stages, "
                'as in fully_shard(..., mesh=mesh["replicas"]) or nn.SyncBatchNorm(..., '
                'process_group=mesh["replicas"].get_group())'
            )
