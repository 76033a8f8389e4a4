"""Run one mini-batch through a pipeline, for programs that split and join micro-batches themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from microbatch import Batch, Versions
from streams import AbstractStream

from .engine import _pipeline
from .engine._mini_batch import compute_outputs
from .engine._stage import build_stages
from .engine._workers import Workers
from .module._arguments import add_index
from .schedule._modes import Stops, stop_of_each
from .skip import SkipLayout, inspect_skip_layout
from .transport._copy import CopyStreams
from .values._leaves import Activation
from .values._sharing import guard_shared

__all__ = ["Pipeline"]


class Pipeline:
    """Computes the outputs of one mini-batch that is already split into micro-batches.

    Args:
        batches: the micro-batches, on the first device. :meth:`run` replaces them by the outputs.
        partitions: the stages, each already on its device.
        devices: the device of each partition; by default the CPU.
        copy_streams: ``copy_streams[j][0]`` is the stream for all copies to and from the device of partition j. By
            default, new streams are created, one per direction.
        skip_layout: the skips between partitions; by default the result of :func:`gpipe.skip.inspect_skip_layout`.
        checkpoint_stop: micro-batches with a smaller index are checkpointed; an int, or a list with one per partition.

    Raises:
        ValueError: the number of devices or copy streams differs from the number of partitions.

    >>> batches = [Batch(torch.ones(1, 2)), Batch(torch.ones(3, 2))]
    >>> Pipeline(batches, [nn.Linear(2, 4), nn.Linear(4, 1)]).run()
    >>> [batch.tensor.shape for batch in batches]
    [torch.Size([1, 1]), torch.Size([3, 1])]
    """

    def __init__(
        self,
        batches: list[Batch],
        partitions: Sequence[nn.Module],
        devices: Sequence[torch.device] | None = None,
        copy_streams: Sequence[Sequence[AbstractStream]] | None = None,
        skip_layout: SkipLayout | None = None,
        checkpoint_stop: Stops = 0,
    ) -> None:
        if any(each is not None and len(each) != len(partitions) for each in (devices, copy_streams)):
            raise ValueError(
                f"devices and copy_streams must have one entry for each of the {len(partitions)} partitions"
            )
        self.batches = batches
        self._checkpoint_stops = stop_of_each(checkpoint_stop, len(partitions))
        places = (
            [torch.device("cpu")] * len(partitions) if devices is None else [add_index(device) for device in devices]
        )
        layout = inspect_skip_layout(list(partitions)) if skip_layout is None else skip_layout
        stages = build_stages(partitions, places, layout)
        if copy_streams is None:
            streams = [CopyStreams.on(device) for device in places]
        else:
            streams = [CopyStreams(stream, stream, stream, stream) for stream, *_ in copy_streams]
        self._pipeline = _pipeline.Pipeline(stages, layout, streams, Workers(places))

    def run(self) -> None:
        """Run all partitions on each micro-batch, and put the outputs into ``batches``.

        Raises:
            Exception: a layer raised it. A note names the partition and micro-batch. If several layers fail, the
                earliest error in the schedule is raised. ``batches`` are unchanged.
        """
        trains, stages = torch.is_grad_enabled(), len(self._checkpoint_stops)

        def run() -> Sequence[Activation]:
            size = self._pipeline.size(len(self.batches), self._checkpoint_stops if trains else (0,) * stages)
            return compute_outputs(self._pipeline, self._pipeline.spec(size), list(self.batches), Versions())

        self.batches[:] = [Batch(guard_shared(batch).value) for batch in self._pipeline.run_lock.run(run)]
