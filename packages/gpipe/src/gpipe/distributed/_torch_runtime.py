"""Our stages and schedules in torch's pipelining runtime; the only file that uses torch's private names for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ..engine._stage import StageLayers
from ..schedule import Kind, Walk
from ..values._describe import shapes
from ._own import Share
from ._part_of_loss import PartOfLoss

_KINDS = {
    Kind.FORWARD: _ComputationType.FORWARD,
    Kind.BACKWARD: _ComputationType.FULL_BACKWARD,
    Kind.BACKWARD_INPUT: _ComputationType.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT: _ComputationType.BACKWARD_WEIGHT,
}


class ExportedStage(StageLayers):
    """A partition that takes and returns what torch sends: a tensor, or several."""

    def __init__(self, partition: nn.Module, index: int, stages: int) -> None:
        super().__init__()
        self._modules.update(partition.named_children())
        self.training = partition.training
        self._index, self._last = index, index == stages - 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._index:
            for value in args:
                if value.requires_grad:
                    value.register_hook(Tensor.contiguous)  # gloo sends contiguous tensors only
            args = (args,) if len(args) > 1 else args  # a tuple, which torch has unpacked
        value = super().forward(*args, **kwargs)
        if self._last or isinstance(value, Tensor):
            return value if self._last else value.contiguous()
        if type(value) is not tuple or len(value) < 2 or not all(isinstance(each, Tensor) for each in value):
            raise TypeError(
                f"stage {self._index} returns {shapes(value)}, which torch's pipelining runtime cannot send: it takes "
                "a tensor, or a tuple of several; change the model or the balance, or use gpipe.distributed.Rank"
            )
        return tuple([each.contiguous() for each in value])


@contextmanager
def _buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    before = [(each._buffers, dict(each._buffers)) for module in modules for each in module.modules()]
    values = [(buffer, buffer.clone()) for _, own in before for buffer in own.values() if buffer is not None]
    try:
        yield
    finally:
        for buffers, own in before:
            buffers.update(own)
        for buffer, value in values:
            buffer.data.copy_(value)


class Runtime(_PipelineScheduleRuntime):  # type: ignore[misc, unused-ignore]
    """torch's runtime with our schedules.

    Args:
        walk: the steps of all ranks.
        loss_fn: the part of a micro-batch in the loss; None if nothing is trained.
    """

    def __init__(self, stages: Sequence[PipelineStage], walk: Walk, chunks: int, loss_fn: PartOfLoss | None) -> None:
        super().__init__(list(stages), chunks, loss_fn=loss_fn, scale_grads=False)  # type: ignore[no-untyped-call]
        self._splits = any(step.action.kind == Kind.BACKWARD_INPUT for steps in walk for step in steps)
        self._part = loss_fn
        self._ready_for: bool | None = None
        self._first: dict[str, str] = {}
        actions: dict[int, list[Any]] = {
            rank: [_Action(j, _KINDS[kind], i) for j, (kind, i) in steps if kind in _KINDS]
            for rank, steps in enumerate(walk)
        }
        self._prepare_schedule_with_comms(actions)

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Like torch's ``step``. Refuses a mini-batch of which torch would drop rows, or compute something else."""
        self._refuse_replicas()
        given = {**{f"argument {k}": value for k, value in enumerate(args)}, **kwargs, "target": target}
        for name, value in given.items():
            if name not in ("losses", "return_outputs", "loss_kwargs"):
                self._expect_rows(name, tree_leaves(value))
        if self._part is not None and target is not None:
            self._part.begin(target, kwargs.get("loss_kwargs") or {})
        return super().step(*args, target=target, **kwargs)

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> Any:
        if self._ready_for == self._has_backward:
            return super()._initialize_stages(*args, **kwargs)
        self._ready_for = self._has_backward
        # To find out shapes, torch computes a forward of uninitialised memory. Batch norm must not keep its statistics.
        with torch.random.fork_rng(devices=[]), _buffers_kept([stage.submod for stage in self._stages]):
            found = super()._initialize_stages(*args, **kwargs)
        if self._part is not None:
            self._part.rewind()
        return found

    def _expect_rows(self, name: str, leaves: Sequence[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for rows in [len(tensor) if tensor.ndim else 0 for tensor in tensors]:
            if not rows or rows % self._n_microbatches:
                raise ValueError(
                    f"{name} has {rows} rows, which torch's pipelining runtime cannot cut into "
                    f"{self._n_microbatches} micro-batches of one size; drop or pad rows, or use "
                    "gpipe.distributed.Rank"
                )
        found = shapes(tensors)
        if tensors and found != self._first.setdefault(name, found):
            raise ValueError(
                f"{name} is {found}, but was {self._first[name]} in the first step, for which torch's pipelining "
                "runtime made its buffers; export once more for these, or use gpipe.distributed.Rank"
            )

    def _refuse_replicas(self) -> None:
        if self._splits and any(isinstance(stage.submod, DistributedDataParallel) for stage in self._stages):
            raise RuntimeError(
                "torch's pipelining runtime computes wrong gradients for a stage in DistributedDataParallel under a "
                "schedule that splits backwards, such as 'zero_bubble'; choose one that does not, such as '1f1b', use "
                "fully_shard, or gpipe.distributed.Rank"
            )


def runtime_of(
    share: Share, walk: Walk, chunks: int, loss_fn: PartOfLoss | None, group: dist.ProcessGroup | None
) -> tuple[list[PipelineStage], Runtime]:
    """The stages of this rank, and what runs them."""
    stages = len(share.every)
    own = [
        PipelineStage(ExportedStage(partition, j, stages), j, stages, device, group=group)
        for j, partition, device in zip(share.numbers, share.partitions, share.devices, strict=True)
    ]
    return own, Runtime(own, walk, chunks, loss_fn)
