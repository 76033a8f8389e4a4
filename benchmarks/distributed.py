"""torch.distributed.pipelining: two processes, gloo between them, the same stages and micro-batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

from .contenders import Contender, Task
from .cores import take_share
from .handed import Stage, connect
from .workloads import Workload

# By schedule: the class, how many stages a rank has, and whether they lie as a V (rank 0 has the last one, too).
SCHEDULES: dict[str, tuple[Any, int]] = {
    "": (schedules.ScheduleGPipe, 1),
    "fill_drain": (schedules.ScheduleGPipe, 1),
    "1f1b": (schedules.Schedule1F1B, 1),
    "zero_bubble": (schedules.ScheduleInterleavedZeroBubble, 1),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2),
}

Built = tuple[Callable[[], Tensor | None], nn.Module, Callable[[], object]]


def build(model: nn.Sequential, batch: Tensor, workload: Workload, contender: Contender, task: Task) -> Built:
    rank = _rank()
    kind, each = SCHEDULES[contender.schedule]
    modules = _modules(model, workload.balance if each == 1 else workload.quarters)
    own = {j: _recomputing(module, contender) for j, module in enumerate(modules) if j % 2 == rank}
    stages = [PipelineStage(module, j, len(modules), torch.device("cpu")) for j, module in own.items()]
    loss = (lambda output, _: workload.loss(output)) if task.training else None
    schedule = kind(stages if each > 1 or _takes_a_list(kind) else stages[0], task.chunks, loss, scale_grads=False)
    parameters = _together(modules, rank)
    return _step(schedule, parameters, batch, rank, task), parameters, dist.barrier


def _rank() -> int:
    """This process's place, among two that keep their connection from task to task."""
    if not dist.is_initialized():
        take_share(int(os.environ["RANK"]), 2)  # before gloo starts threads of its own
        dist.init_process_group("gloo")
    return dist.get_rank()


def _modules(model: nn.Sequential, balance: tuple[int, ...] | None) -> list[Stage]:
    from .programs import slices

    assert balance is not None
    stages = [Stage(layers) for layers in slices(model, balance)]
    connect(stages)
    return stages


def _takes_a_list(kind: Any) -> bool:
    return issubclass(kind, schedules.PipelineScheduleMulti)


def _together(modules: list[Stage], rank: int) -> nn.Module:
    """This rank's layers under their own names."""
    return nn.ModuleDict({name: layer for module in modules[rank::2] for name, layer in module.named_children()})


class _Recomputing(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False)


def _recomputing(module: nn.Module, contender: Contender) -> nn.Module:
    return _Recomputing(module) if contender.checkpoint == "always" else module


def _step(schedule: Any, parameters: nn.Module, batch: Tensor, rank: int, task: Task) -> Callable[[], Tensor | None]:
    # The loss looks at outputs alone, but a schedule wants a target for each micro-batch.
    target = {"target": torch.zeros(len(batch))} if task.training else {}
    how = {"return_outputs": False} if task.training else {}
    last = {**target, **how} if rank == 1 else how

    def step() -> Tensor | None:
        parameters.zero_grad()
        x = (batch.detach().requires_grad_(task.training),) if rank == 0 else ()
        return schedule.step(*x, **last)

    return step
