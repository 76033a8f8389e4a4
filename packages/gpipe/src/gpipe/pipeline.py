"""The pipeline: micro-batches go in, outputs come out, and a backward from the outputs goes the same way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from microbatch import Batch, Versions
from streams import AbstractStream, new_stream

from ._autograd import attach
from ._run import Run
from ._stage import Stage
from ._value import cut, mapped
from ._workers import Workers
from .skip import SkipLayout, inspect_skip_layout


class Pipeline:
    """One mini-batch, cut into micro-batches, on its way through the partitions.

    Args:
        batches: the micro-batches, on the first device. :meth:`run` puts the outputs in their place.
        partitions: the stages, each on its own device.
        devices: one for each partition; the CPU if not given.
        copy_streams: ``copy_streams[j][0]`` is the stream on which values come to and go from the device of partition
            j; new ones if not given.
        skip_layout: which skips go from where to where; found out if not given.
        checkpoint_stop: micro-batches below it are checkpointed: recomputed when their backward comes.
        versions: how in-place changes of the micro-batches and of what they were cut from reach each other.
        workers: the threads to run on; if not given, some that live as long as this object.
    """

    def __init__(
        self,
        batches: list[Batch],
        partitions: Sequence[nn.Module | Stage],
        devices: Sequence[torch.device] | None = None,
        copy_streams: Sequence[Sequence[AbstractStream]] | None = None,
        skip_layout: SkipLayout | None = None,
        checkpoint_stop: int = 0,
        *,
        versions: Versions | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.batches = batches
        devices = [torch.device("cpu")] * len(partitions) if devices is None else list(devices)
        self._layout = (
            inspect_skip_layout([_module(each) for each in partitions]) if skip_layout is None else skip_layout
        )
        self._stages = [
            each if isinstance(each, Stage) else Stage(j, each, device, self._layout)
            for j, (each, device) in enumerate(zip(partitions, devices, strict=True))
        ]
        self._copy_streams = [new_stream(d) for d in devices] if copy_streams is None else [s[0] for s in copy_streams]
        self._checkpoint_stop = checkpoint_stop
        self._versions = Versions() if versions is None else versions
        self._workers = Workers.for_owner(self, devices) if workers is None else workers

    def run(self) -> None:
        """Put each micro-batch through all partitions.

        What a layer raises reaches the caller as it is, with a note that says where; of several failures, the earliest
        in the schedule. Then ``batches`` are as before.
        """
        inputs = list(self.batches)
        run = Run(self._stages, self._copy_streams, self._workers, len(inputs), self._checkpoint_stop, self._layout)
        outputs = run.forward([cut(batch) for batch in inputs])
        self._versions.sync()
        if torch.is_grad_enabled():
            outputs = _attached(run, self._versions, inputs, outputs)
        self.batches[:] = outputs


def _module(partition: nn.Module | Stage) -> nn.Module:
    return partition.module if isinstance(partition, Stage) else partition


def _attached(run: Run, versions: Versions, inputs: Sequence[Batch], outputs: Sequence[Batch]) -> list[Batch]:
    """The outputs as autograd's results of the inputs."""
    flags = [[tensor.requires_grad for tensor in batch] for batch in outputs]

    def backward(seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
        versions.sync()
        flowing = iter(seeds)
        gradients = [[next(flowing) if flag else None for flag in each] for each in flags]
        return [gradient for each in run.backward(gradients) for gradient in each]

    ends = [tensor for batch in outputs for tensor in batch if tensor.requires_grad]
    attached = iter(attach(backward, [tensor for batch in inputs for tensor in batch], ends))
    return [mapped(batch, lambda tensor: next(attached) if tensor.requires_grad else tensor) for batch in outputs]
