"""The pipeline: micro-batches go in, outputs come out, and a backward from the outputs goes the same way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Batch, Versions
from streams import AbstractStream, add_note, new_stream

from .engine._autograd import attach
from .engine._exclusive import Section
from .engine._loss import LossEnd
from .engine._run import Run
from .engine._stage import Stage
from .engine._workers import Workers
from .module._data_parallel import refuse_data_parallel
from .schedule import Schedule
from .skip import SkipLayout, inspect_skip_layout
from .values._aliases import Aliased, packed, unpacked
from .values._gather import gathered
from .values._leaves import cut, mapped
from .values._sharing import KEPT, SEEN, guarded, marked, overlap, released, tied, ties_of


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

    def train(self, end: LossEnd, schedule: Schedule | str) -> None:
        """Put each micro-batch through all partitions and back, as ``schedule`` says, turning around at ``end``.

        Gradients arrive in ``.grad``, also those of what the micro-batches were computed from. What a layer raises
        reaches the caller as in :meth:`run`. Then the ``.grad`` of a parameter that had none is None again; to others,
        what had been computed so far has been added, and the error says of how many micro-batches.
        """
        with self._workers.section.entered(accumulates=True):
            self._train(end, schedule)

    def _train(self, end: LossEnd, schedule: Schedule | str) -> None:
        run = self._run(end)
        walk = run.walk(schedule)
        refuse_data_parallel(run.kept)
        before = _Gradients([p for stage in self._stages for p in stage.module.parameters()])
        mixed = 0
        try:
            entering = _entering(self.batches)
            gradients = _spread(entering, run.train(entering, walk))
            leaves, whole = run.whole()
            mixed = len(self.batches)
            inputs, flowing = self._flowing(gradients, end.scale)
            # In one backward: a leaf may be both above and in the loss, and hooks may wait for several gradients.
            torch.autograd.backward([*inputs, *leaves], [*flowing, *whole])
        except BaseException as error:
            before.restore(error, max(mixed, run.mixed), len(self.batches))
            end.restore()
            raise

    def _flowing(self, gradients: Sequence[list[Tensor | None]], scale: float) -> tuple[list[Tensor], list[Tensor]]:
        """What of the micro-batches was computed with grad, and ``scale`` times its gradients."""
        flowing = [
            (tensor, gradient if scale == 1.0 else gradient * scale)
            for batch, each in zip(self.batches, gradients, strict=True)
            for tensor, gradient in zip(batch, each, strict=True)
            if gradient is not None and tensor.requires_grad  # a layer may have made its leaf require grad
        ]
        return [tensor for tensor, _ in flowing], [gradient for _, gradient in flowing]

    def run(self) -> None:
        """Put each micro-batch through all partitions.

        What a layer raises reaches the caller as it is, with a note that says where; of several failures, the earliest
        in the schedule. Then ``batches`` are as before.
        """
        inputs = list(self.batches)
        entering = _entering(inputs)
        with self._workers.section.entered():
            run = self._run()
            outputs = run.forward(entering)
            self._versions.sync()
        if len(outputs) == 1:
            outputs = [released(outputs[0])]  # others are released when they are put together
        if torch.is_grad_enabled():
            outputs = _attached(run, self._workers.section, self._versions, inputs, entering, outputs)
        self._outputs = outputs
        self.batches[:] = [Batch(unpacked(guarded(batch).value)) for batch in outputs]

    def gathered(self, rows: Sequence[tuple[int, ...]], spec: Any = None) -> Any:
        """The outputs of the last :meth:`run` put together; ``rows`` is how many rows went into each micro-batch."""
        return gathered(self._outputs, rows, spec)

    def _run(self, end: LossEnd | None = None) -> Run:
        return Run(
            self._stages,
            self._copy_streams,
            self._workers,
            len(self.batches),
            self._checkpoint_stop,
            self._layout,
            end,
        )


class _Gradients:
    """Which parameters have no gradient before a training step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._empty = [parameter for parameter in parameters if parameter.grad is None]
        self._others = len(parameters) - len(self._empty)

    def restore(self, error: BaseException, mixed: int, microbatches: int) -> None:
        """After a failure: what had no gradient has none, and ``error`` says what became of the others.

        Args:
            mixed: how many of the ``microbatches`` may have added to them.
        """
        for parameter in self._empty:
            parameter.grad = None
        if self._others and mixed:
            add_note(
                error,
                f"the .grad of {self._others} parameters held gradients before this step, and now may also hold those "
                f"of up to {mixed} of its {microbatches} micro-batches; call zero_grad() before the next step",
            )


def _entering(batches: Sequence[Batch]) -> list[Batch]:
    """The micro-batches as the first stage takes them, whose memory is the caller's."""
    entering = [cut(Batch(_packed(batch))) for batch in batches]
    tie = KEPT | SEEN if overlap(batches) else KEPT
    return [tied(batch, [tie | own for own in ties_of(marked(batch, batch))]) for batch in entering]


def _packed(batch: Batch) -> Any:
    """Packed, if each gradient that comes back is one of a tensor in ``batch``."""
    value, own = packed(batch.value), [id(tensor) for tensor in batch]
    whole = not isinstance(value, Aliased) or all(id(s) in own for s in value.sources if s.requires_grad)
    return value if whole else batch.value


def _spread(entering: Sequence[Batch], gradients: Sequence[list[Tensor | None]]) -> list[list[Tensor | None]]:
    """The gradients of all tensors of the caller, given those of what they were packed in."""
    return [
        batch.value.spread(each) if isinstance(batch.value, Aliased) else each
        for batch, each in zip(entering, gradients, strict=True)
    ]


def _module(partition: nn.Module | Stage) -> nn.Module:
    return partition.module if isinstance(partition, Stage) else partition


def _attached(
    run: Run,
    section: Section,
    versions: Versions,
    inputs: Sequence[Batch],
    entering: Sequence[Batch],
    outputs: Sequence[Batch],
) -> list[Batch]:
    """The outputs as autograd's results of the inputs."""
    flags = [[tensor.requires_grad for tensor in batch] for batch in outputs]

    def backward(seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
        versions.sync()
        flowing = iter(seeds)
        gradients = [[next(flowing) if flag else None for flag in each] for each in flags]
        with section.entered(accumulates=True):
            found, own = run.backward(gradients)
        return [*(gradient for each in _spread(entering, found) for gradient in each), *own]

    ends = [tensor for batch in outputs for tensor in batch if tensor.requires_grad]
    attached = iter(attach(backward, [*(tensor for batch in inputs for tensor in batch), *run.kept], ends))
    return [mapped(batch, lambda tensor: next(attached) if tensor.requires_grad else tensor) for batch in outputs]
