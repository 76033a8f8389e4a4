"""Layers that communicate with other processes in training: ``nn.SyncBatchNorm``.

Its collectives run when the schedule reaches the layer. They match if the layer's group consists of the processes with
the same stages, one of each replica, and these reach the layer in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import nn


def synced_layers(module: nn.Module) -> dict[str, nn.SyncBatchNorm]:
    """The layers of this kind in ``module``, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)}


def expect_synced(layers: Mapping[str, nn.SyncBatchNorm], members: Sequence[int], *, is_chosen: bool) -> None:
    """Raise ValueError if any of ``layers`` would wait forever, or receive the values of another layer.

    Args:
        members: the processes of the pipe, in the world.
        is_chosen: whether the schedule depends on what each replica measures.
    """
    for name, layer in layers.items():
        others = _others(layer) if layer.training else set()
        if others.intersection(members):
            raise ValueError(
                f"layer {name!r} is an nn.SyncBatchNorm over a group with rank {min(others.intersection(members))}, "
                "which has other stages of this pipe and never comes to it; give it the processes with the same "
                'stages, as nn.SyncBatchNorm(..., process_group=mesh["replicas"].get_group())'
            )
        if others and is_chosen:
            raise ValueError(
                f"layer {name!r} is an nn.SyncBatchNorm, which all replicas have to come to in the same order, and "
                "each would choose its own schedule by what it measures; give one that does not depend on that, such "
                'as schedule="1f1b"'
            )


def groups_of(layers: Iterable[nn.SyncBatchNorm]) -> set[dist.ProcessGroup]:
    """The process groups over which any of ``layers`` communicates in training."""
    groups = [layer.process_group or dist.group.WORLD for layer in layers if layer.training and _others(layer)]
    return {group for group in groups if group is not None}


def _others(layer: nn.SyncBatchNorm) -> set[int]:
    """The processes with which a layer computes, beside this one."""
    return {*dist.get_process_group_ranks(layer.process_group)} - {dist.get_rank()}
