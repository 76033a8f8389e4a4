"""The stages of a pipe, their threads, and the runs of mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from threading import Thread, current_thread
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from microbatch import Batch, Versions
from streams import AbstractStream, add_note

from ..checkpoint._random import interception
from ..schedule import Choice, Schedule
from ..skip import SkipLayout
from ..transport._copy import CopyStreams
from ..transport._transport import Link, Transport
from ..values._leaves import Activation, detach_leaves
from ..values._sharing import PRESERVED, flag_aliases, owned
from ._autograd import attach
from ._autograd_calls import accumulate_whole
from ._failures import Failures
from ._losses import Losses
from ._processes import ALONE, Processes, may_be_data_parallel, refuse_data_parallel
from ._run import Run
from ._scale import Scale, scaled
from ._settings import Observer, settings
from ._stage import Stage
from ._walks import walk_of
from ._workers import Workers


class Pipeline:
    """The stages of a pipe. Mini-batches go through them one at a time.

    Args:
        copy_streams: for each stage, the streams that copy tensors to and from its device.

    Attributes:
        count: the number of stages in all processes.
        begins, ends: whether the first and the last stage are in this process.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        layout: SkipLayout,
        copy_streams: Sequence[CopyStreams],
        workers: Workers,
        processes: Processes = ALONE,
    ) -> None:
        self.stages = stages
        self.devices = [stage.device for stage in stages]
        self.on_accelerator = any(stage.on_accelerator for stage in stages)
        self.workers = workers
        self.processes = processes
        self.count = len(stages if processes.ranks is None else processes.ranks)
        self.begins = all(stage.index == 0 for stage in stages[:1])
        self.ends = all(stage.index == self.count - 1 for stage in stages[-1:])
        self._layout = layout
        self._copy_streams = copy_streams
        self._trainers = WeakSet[Thread]()
        interception.prepare()

    @property
    def placement(self) -> tuple[int, ...]:
        return (0,) * self.count if settings().inline and self.processes.ranks is None else self.lines

    @property
    def lines(self) -> tuple[int, ...]:
        """The worker, or the process, of each stage, as a timeline shows them."""
        return self.workers.placement if self.processes.ranks is None else self.processes.ranks

    @property
    def threads(self) -> Workers | None:
        """The workers; None if the caller's thread computes all stages of this process."""
        return None if self.processes.ranks is not None or settings().inline else self.workers

    def forward(
        self, batches: Sequence[Batch], checkpoint_stops: tuple[int, ...], versions: Versions
    ) -> list[Activation]:
        """Compute the outputs of all micro-batches, connected to the caller's graph.

        Of several errors the earliest in the schedule is raised, with a note that says where it happened.

        Args:
            checkpoint_stops: for each stage, the number below which micro-batches are recomputed before their backward.
            versions: makes in-place changes known between the micro-batches and the tensors that they were cut from.
        """
        # One run at a time: all of them use the same parameters, workers and buffers.
        with self.workers.section.entered():
            if torch.is_grad_enabled():
                self._trainers.add(current_thread())
            run = Run(self, len(batches), checkpoint_stops)
            with self.processes.together(run):
                outputs = run.forward(self._entering(batches))
            # Layers may have changed micro-batches in place, which share the memory of the caller's tensors.
            versions.sync()
        # The only micro-batch may be returned as it is: the caller may change it, and a recomputation may need it.
        if len(outputs) == 1:  # several are copied when they are concatenated
            outputs = [owned(outputs[0])]
        if torch.is_grad_enabled():
            outputs = self._attached(run, versions, batches, outputs)
        return outputs

    def train(
        self,
        batches: Sequence[Batch],
        checkpoint_stops: tuple[int, ...],
        loss: Losses,
        schedule: Schedule | Choice,
        observer: Observer | None = None,
    ) -> None:
        """Compute forwards, losses and backwards of all micro-batches; add gradients to ``.grad``.

        After an error, the ``.grad`` of a parameter that had none is None again; to others, gradients of some
        micro-batches may have been added, and a note on the error says so.
        """
        with self.workers.section.entered():
            self._trainers.add(current_thread())
            run = Run(self, len(batches), checkpoint_stops, loss, observer)
            self.workers.section.claim(run.parameters)
            walk = walk_of(
                schedule, run.size, has_loss=loss.is_whole
            )  # raises before anything has changed if the schedule does not fit
            # A failure leaves no parts of gradients where there were none.
            empty = [parameter for parameter in run.parameters if parameter.grad is None]
            adds = False
            try:
                with self.processes.together(run):
                    refuse_data_parallel(run.kept_nodes)
                    gradients = run.train(self._entering(batches), walk)
                whole = self.processes.whole(run)
                # From here on gradients may be added to those that were there, also if a hook fails.
                adds = True
                # In one backward: a leaf may be used both before the pipe and in the loss, and hooks may wait for
                # several gradients.
                accumulate_whole([*_flowing(batches[: len(gradients)], gradients, loss.scale), *whole.items()])
            except BaseException as error:
                run.deferred.give_back(failed=True)
                _restore(run, empty, error, adds or run.adds)
                raise

    def evaluate(self, batches: Sequence[Batch], losses: Losses) -> None:
        with self.workers.section.entered(), torch.no_grad():
            run = Run(self, len(batches), (0,) * self.count, losses)
            with self.processes.together(run):
                run.evaluate(self._entering(batches))

    def _entering(self, batches: Sequence[Batch]) -> list[Activation]:
        return [*map(_entering, batches)] if self.begins else []

    def transport(
        self, streams: Sequence[AbstractStream], link: type[Link[Any]], failures: Failures, loss: Losses | None
    ) -> Transport:
        remote = partial(self.processes.channel, failures=failures, loss=loss)
        places = zip(self.devices, streams, self._copy_streams, strict=True)
        own = {stage.index: place for stage, place in zip(self.stages, places, strict=True)}
        return Transport(own, self.count, self._layout, link, failures.forestall_current, remote)

    def _attached(
        self, run: Run, versions: Versions, inputs: Sequence[Batch], outputs: Sequence[Activation]
    ) -> list[Activation]:
        counts = [len(output.tensors) for output in outputs]

        def backward(seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
            # And the caller may have changed those since: what autograd has saved of them is then refused.
            versions.sync()
            flowing = iter(seeds)
            with self.workers.section.entered():
                self.workers.section.claim(run.parameters)
                if left and len(self._trainers) > 1:
                    raise RuntimeError(_SEVERAL_THREADS)
                try:
                    found, own = run.backward([[*islice(flowing, count)] for count in counts], left)
                except BaseException:
                    run.deferred.give_back(failed=True)  # an interrupt may come after the workers are done
                    raise
            return [*chain.from_iterable(found), *own]

        # DistributedDataParallel has hooks on the nodes of these parameters, which have to see one gradient, with that
        # from other parts of the caller's graph. But autograd adds it after this section, when another thread that
        # trains the pipe may accumulate outside .grad.
        left = run.kept_nodes if run.kept_nodes and may_be_data_parallel() else []
        tensors = [tensor for output in outputs for tensor in output.tensors]
        attached = iter(attach(backward, [*chain.from_iterable(inputs), *left], tensors))
        return [output.with_tensors(islice(attached, len(output.tensors))) for output in outputs]


_SEVERAL_THREADS = (
    "several threads train this pipe, and hooks of its parameters, such as those of DistributedDataParallel, wait for "
    "gradients that the caller's backward adds; train it in one thread, or by step()"
)


def _restore(run: Run, empty: Sequence[nn.Parameter], error: BaseException, adds: bool) -> None:
    """After a failure: set ``.grad`` of ``empty`` back to None, and note whether ``run`` added to that of others."""
    for parameter in empty:
        parameter.grad = None
    others = len({*run.parameters}) - len({*empty})  # stages may share parameters
    if others and adds:
        add_note(
            error,
            f"the .grad of {others} parameters held gradients before this step, and now may also hold those of some of "
            "its micro-batches; call zero_grad() before the next step",
        )


def _entering(batch: Batch) -> Activation:
    if isinstance(batch.value, Tensor):
        return Activation(batch.value.detach().requires_grad_(batch.value.requires_grad), marks=(PRESERVED,))
    leaves = detach_leaves(Activation(batch.value))
    return flag_aliases(leaves, leaves, [(tensor, PRESERVED) for tensor in leaves.tensors])


def _flowing(
    batches: Sequence[Batch], gradients: Sequence[list[Tensor | None]], scale: Scale
) -> list[tuple[Tensor, Tensor]]:
    pairs = (zip(batch, each, strict=True) for batch, each in zip(batches, gradients, strict=True))
    return [
        (tensor, scaled(gradient, scale))
        for tensor, gradient in chain.from_iterable(pairs)
        if gradient is not None and tensor.requires_grad  # a layer may have made its own leaf require grad
    ]
