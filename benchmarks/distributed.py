"""torch.distributed.pipelining: two processes, gloo between them, the same stages and micro-batches.

It has no skip connections, so each stage relays them next to its output. The layers that skip are written in the
vocabulary of `gpipe.skip`, which this module also has: `skippable`, `stash` and `pop` work inside a :class:`SkipRelay`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.checkpoint import checkpoint

from .contenders import Contender, Task
from .measure import bind_to_share
from .programs import optimizer_of, slices
from .workloads import Workload

Layer = TypeVar("Layer", bound=type)

# Schedule name: (class, stages per rank)
SCHEDULES: dict[str, tuple[Any, int]] = {
    "fill_drain": (schedules.ScheduleGPipe, 1),
    "1f1b": (schedules.Schedule1F1B, 1),
    "zero_bubble": (schedules.ScheduleInterleavedZeroBubble, 1),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2),
}

Built = tuple[Callable[[], Tensor | None], nn.Module, Callable[[], object]]


def build(model: nn.Sequential, batch: Tensor, workload: Workload, contender: Contender, task: Task) -> Built:
    """This rank's step, its layers, and the barrier that all ranks pass before a step."""
    rank = place()
    kind, each = SCHEDULES[contender.schedule]
    relays = _relays(model, cuts(workload, contender))
    own = {j: _recomputing(relay, contender) for j, relay in enumerate(relays) if j % 2 == rank}
    stages = [PipelineStage(module, j, len(relays), torch.device("cpu")) for j, module in own.items()]
    loss = (lambda output, _: workload.loss(output)) if task.training else None
    schedule = kind(stages if each > 1 or _takes_a_list(kind) else stages[0], task.chunks, loss, scale_grads=False)
    layers = _layers(relays, rank)
    return _step(schedule, layers, batch, rank, task), layers, dist.barrier


def place() -> int:
    """This process's place, among two that keep their connection from task to task."""
    if not dist.is_initialized():
        bind_to_share(int(os.environ["RANK"]), 2)  # before gloo starts its threads
        dist.init_process_group("gloo")
    return dist.get_rank()


def cuts(workload: Workload, contender: Contender) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    found = workload.quarters if contender.schedule == "interleaved" else workload.balance
    found = workload.even if contender.library.endswith("even cuts") else found
    assert found is not None
    return found


def _relays(model: nn.Sequential, balance: tuple[int, ...]) -> list[SkipRelay]:
    stages = [SkipRelay(layers) for layers in slices(model, balance)]
    connect(stages)
    return stages


def _takes_a_list(kind: Any) -> bool:
    return issubclass(kind, schedules.PipelineScheduleMulti)


def _layers(relays: list[SkipRelay], rank: int) -> nn.Module:
    """This rank's layers under their own names."""
    return nn.ModuleDict({name: layer for relay in relays[rank::2] for name, layer in relay.named_children()})


class _Recomputing(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False)


def _recomputing(module: nn.Module, contender: Contender) -> nn.Module:
    return _Recomputing(module) if contender.checkpoint == "always" else module


def _step(schedule: Any, layers: nn.Module, batch: Tensor, rank: int, task: Task) -> Callable[[], Tensor | None]:
    # The loss uses only outputs, but a schedule requires one target per micro-batch.
    target = {"target": torch.zeros(len(batch))} if task.training else {}
    how = {"return_outputs": False} if task.training else {}
    last = {**target, **how} if rank == 1 else how
    optimizer = optimizer_of(layers)

    def train() -> None:
        optimizer.zero_grad()
        x = (batch.detach().requires_grad_(),) if rank == 0 else ()
        schedule.step(*x, **last)
        optimizer.step()

    def forward() -> Tensor | None:
        return schedule.step(*((batch.detach(),) if rank == 0 else ()))

    return train if task.training else forward


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[Layer], Layer]:
    """Replace `gpipe.skip.skippable`."""

    def decorate(layer: Layer) -> Layer:
        layer.stashed, layer.popped = list(stash), list(pop)  # type: ignore[attr-defined]
        return layer

    return decorate


def stash(name: str, tensor: Tensor) -> tuple[str, Tensor | None]:
    """Replace `gpipe.skip.stash`."""
    return name, tensor


def pop(name: str) -> tuple[str, Tensor | None]:
    """Replace `gpipe.skip.pop`."""
    return name, None


class SkipRelay(nn.Sequential):
    """A stage that takes `(*x, *skips named in incoming)` and returns `(*x, *skips named in outgoing)`.

    If layers pass a tuple to each other, x is several tensors.
    """

    incoming: list[str]
    outgoing: list[str]

    def forward(self, *values: Tensor) -> Any:
        for value in values[1:]:
            if value.requires_grad:
                value.register_hook(Tensor.contiguous)  # gloo sends only contiguous gradients
        own = len(values) - len(self.incoming)
        x: Any = values[0] if own == 1 else values[:own]
        held = dict(zip(self.incoming, values[own:], strict=True))
        for layer in self:
            result = layer(x)
            x = _serve(result, held) if isinstance(result, Generator) else result
        found = (*(x if isinstance(x, tuple) else (x,)), *(held[name] for name in self.outgoing))
        return found if len(found) > 1 else x


def connect(stages: list[SkipRelay]) -> None:
    """Set the skips that enter and leave each stage, as stashed and popped by its layers."""
    crossing: list[str] = []
    for stage in stages:
        stage.incoming = list(crossing)
        for layer in stage:
            crossing = [name for name in crossing if name not in getattr(layer, "popped", ())]
            crossing += getattr(layer, "stashed", ())
        stage.outgoing = list(crossing)


def _serve(steps: Generator[tuple[str, Tensor | None], Tensor | None, Tensor], held: dict[str, Tensor]) -> Tensor:
    """Run a layer's forward to its end: keep what it stashes in `held`, give it what it pops."""
    answer = None
    while True:
        try:
            name, tensor = steps.send(answer)
        except StopIteration as end:
            return end.value
        if tensor is None:
            answer = held.pop(name)
        else:
            held[name], answer = tensor, None
