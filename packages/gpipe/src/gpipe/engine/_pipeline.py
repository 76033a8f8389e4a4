"""A pipe as the engine sees it, built once: its stages, the threads that run them, and the way of a mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, compress, islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Batch, Versions
from streams import AbstractStream, add_note

from ..checkpoint._random import RunRNG
from ..schedule import Choice, Schedule, Walk
from ..skip import SkipLayout
from ..transport._channels import Channels, Connect, Nearby
from ..transport._copy import CopyStreams
from ..transport._link import Link, stall_seconds
from ..values._aliases import Aliased, packed
from ..values._leaves import Activation, detach_leaves
from ..values._sharing import KEPT, SEEN, among, flag_aliases, overlap, released, ties_of, with_ties
from ._autograd import attach
from ._autograd_calls import accumulate_whole
from ._data_parallel import refuse_data_parallel
from ._draws import DrawFacts
from ._failed_cell import failed_cell, mark, mark_late
from ._failures import Failures
from ._loss import LossStage
from ._losses import Losses
from ._parameters import parameters_of
from ._run import Run
from ._scale import Scale, scaled
from ._settings import Observer, settings
from ._stage import Stage
from ._walks import Size, forwards_and_backwards, walk_of
from ._workers import Workers

_requires_grad = attrgetter("requires_grad")


class Pipeline:
    """The stages of a pipe, which mini-batches go through one at a time.

    Args:
        stages: each on its own device.
        layout: which skips go from where to where.
        copy_streams: for each stage, the streams on which tensors come to and go from its device.
        workers: the threads to run on.

    Attributes:
        devices: of the stages.
        on_accelerator: whether the work of any stage is queued on streams.
        loss_facts: whether losses draw random numbers, as far as runs have shown.
        count: how many partitions there are.
        connected: how many stages they are in: a partition in pieces is several.
        line: whose steps the caller's thread does, if it does them itself: all stages are on one worker then.
    """

    line = 0

    def __init__(
        self, stages: Sequence[Stage], layout: SkipLayout, copy_streams: Sequence[CopyStreams], workers: Workers
    ) -> None:
        self.stages = stages
        self.devices = [stage.device for stage in stages]
        self.on_accelerator = any(stage.on_accelerator for stage in stages)
        self.workers = workers
        self.loss_facts = DrawFacts()
        self.count = len({stage.partition for stage in stages})
        self.connected = len(stages)
        self._layout = layout
        self._copy_streams = copy_streams

    @property
    def placement(self) -> tuple[int, ...]:
        """The worker of each stage, in a run that begins here and now."""
        return (0,) * self.count if settings().inline else self.workers.placement

    @property
    def lines(self) -> tuple[int, ...]:
        """The worker of each stage, as a timeline shows them: also of what runs inline."""
        return self.workers.placement

    def walk(self, schedule: Schedule | Choice, size: Size) -> Walk:
        """What the workers do in a training step under ``schedule``.

        Raises:
            ValueError: the schedule does not fit.
        """
        return walk_of(schedule, *size)

    def halves(self, size: Size) -> tuple[Walk, Walk]:
        """What the workers do before the caller gets the outputs, and after it gave the gradients."""
        return forwards_and_backwards(*size)

    @property
    def threads(self) -> Workers | None:
        """The workers; None where the caller's thread does their work."""
        return None if settings().inline else self.workers

    def random_numbers(self) -> RunRNG:
        """Where the random numbers of a run that begins come from."""
        return RunRNG()

    def failures(self) -> Failures:
        """Where the failures of a run that begins are collected."""
        return Failures()

    def together(self, run: Run) -> AbstractContextManager[None]:
        """Around all that a run does: those who take part in it end together. Here there is nobody else."""
        return nullcontext()

    def forward(
        self, batches: Sequence[Batch], checkpoint_stops: tuple[int, ...], versions: Versions
    ) -> list[Activation]:
        """Put each micro-batch through all stages; the outputs, in the caller's graph.

        What a layer raises reaches the caller as it is, with a note that says where; of several failures, the earliest
        in the schedule.

        Args:
            batches: the micro-batches, on the first device.
            checkpoint_stops: of each stage; micro-batches below it are checkpointed: recomputed when their backward
                comes.
            versions: how in-place changes of the micro-batches and of what they were cut from reach each other.
        """
        entering = self.entering(batches)
        with self.workers.section.entered():
            run = Run(self, len(batches), checkpoint_stops)
            try:
                outputs = run.forward(entering)
            finally:
                self._keep(run)
            versions.sync()
        # Several are copied when they are put together.
        outputs = [(released if len(outputs) == 1 else among)(each) if each.ties else each for each in outputs]
        if torch.is_grad_enabled():
            outputs = self._attached(run, versions, batches, entering, outputs)
        return outputs

    def train(
        self,
        batches: Sequence[Batch],
        checkpoint_stops: tuple[int, ...],
        loss: LossStage,
        schedule: Schedule | Choice,
        observer: Observer | None = None,
        *,
        undoes: bool = False,
    ) -> None:
        """Put each micro-batch through all stages and back, as ``schedule`` says, turning around at ``loss``.

        Gradients arrive in ``.grad``, also those of what the micro-batches were computed from. What a layer raises
        reaches the caller as in :meth:`forward`. Then the ``.grad`` of a parameter that had none is None again; to
        others, what had been computed so far has been added, and the error says of how many micro-batches.

        Args:
            observer: wants to know of this run, unless somebody does who wants to know of every run.
            undoes: whether a failure leaves every ``.grad`` as it was, unless the error is marked as
                late. Gradients that were there before then take their memory beside those of this step.
        """
        with self.workers.section.entered(accumulates=True):
            run = Run(self, len(batches), checkpoint_stops, loss, observer)
            walk = self.walk(schedule, run.mini_batch.size)
            parameters = [p for stage in self.stages for p in parameters_of(stage.module)]
            before = _Gradients(parameters)
            mixed = 0
            try:
                if undoes:
                    loss.undo_on_failure(parameters)
                with self.together(run):
                    refuse_data_parallel(run.mini_batch.kept_nodes)
                    entering = self.entering(batches)
                    found = run.train(entering, walk)
                gradients = _spread(entering, found)
                leaves, whole = self.whole(run)
                mixed = len(batches)
                inputs, flowing = _flowing(batches[: len(gradients)], gradients, loss.scale)
                # In one backward: a leaf may be both above and in the loss, and hooks may wait for several gradients.
                if inputs or leaves:
                    accumulate_whole([*inputs, *leaves], [*flowing, *whole])
            except BaseException as error:
                run.mini_batch.deferred.give_back()  # the walk may not have begun
                before.restore(error, max(mixed, run.mixed), len(batches))
                loss.restore()
                _tell(error, schedule)
                if mixed:
                    mark_late(error)
                raise
            finally:
                self._keep(run)

    def evaluate(self, batches: Sequence[Batch], losses: Losses) -> None:
        """Put each micro-batch through all stages and into ``losses``, without gradients."""
        with self.workers.section.entered(), torch.no_grad():
            run = Run(self, len(batches), (0,) * self.count, losses)
            try:
                with self.together(run):
                    run.evaluate(self.entering(batches))
            finally:
                self._keep(run)

    def tied_elsewhere(self, stage: Stage) -> list[Tensor]:
        """The leaves of ``stage`` that other processes have too: their gradients are parts of a sum."""
        return []

    def whole(self, run: Run) -> tuple[list[Tensor], list[Tensor]]:
        """As :meth:`Run.whole`, of all processes."""
        return run.whole()

    def entering(self, batches: Sequence[Batch]) -> list[Activation]:
        """The micro-batches as the first stage takes them; none where that is elsewhere."""
        return _entering(batches)

    def channels(self, streams: Sequence[AbstractStream], link: type[Link[Any]], failures: Failures) -> Channels:
        """All channels of a run whose stages compute on ``streams``."""
        numbers = [stage.index for stage in self.stages]
        places = dict(zip(numbers, zip(self.devices, streams, self._copy_streams, strict=True), strict=True))
        connect = self.connect(Nearby(places, link, stall_seconds(), failures.forestall_current), failures)
        return Channels(numbers, self.connected, self._layout, connect)

    def connect(self, nearby: Nearby, failures: Failures) -> Connect:
        """What makes the channels of a run."""
        return nearby

    def _keep(self, run: Run) -> None:
        """Keep the facts that ``run`` has found, for the next one; also those of one that failed."""
        for stage, facts in zip(self.stages, run.facts(), strict=True):
            stage.facts = facts
        if run.mini_batch.loss is not None:
            self.loss_facts = run.mini_batch.loss.draws.facts

    def _attached(
        self,
        run: Run,
        versions: Versions,
        inputs: Sequence[Batch],
        entering: Sequence[Activation],
        outputs: Sequence[Activation],
    ) -> list[Activation]:
        """The outputs as autograd's results of the inputs."""
        tensors = [tensor for output in outputs for tensor in output.tensors]
        counts = [len(output.tensors) for output in outputs]
        flags = list(map(_requires_grad, tensors))

        def backward(seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
            versions.sync()
            flowing = iter(seeds)
            gradients = iter([next(flowing) if flag else None for flag in flags])
            with self.workers.section.entered(accumulates=True):
                try:
                    found, own = run.backward([list(islice(gradients, count)) for count in counts])
                finally:
                    self._keep(run)
            return [*chain.from_iterable(_spread(entering, found)), *own]

        sources = [*chain.from_iterable(inputs), *run.mini_batch.kept_nodes]
        attached = iter(attach(backward, sources, list(compress(tensors, flags))))
        results = iter([next(attached) if flag else tensor for tensor, flag in zip(tensors, flags, strict=True)])
        return [output.with_tensors(islice(results, len(output.tensors))) for output in outputs]


def _tell(error: BaseException, schedule: Schedule | Choice) -> None:
    """Let ``error`` say what the run was under."""
    cell = failed_cell(error)
    if cell is not None:
        name, split = (schedule.name, schedule.split) if isinstance(schedule, Choice) else ("own", ())
        mark(error, cell._replace(schedule=name, split=split))


class _Gradients:
    """Which parameters have no gradient before a training step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._empty = [parameter for parameter in parameters if parameter.grad is None]

    def restore(self, error: BaseException, mixed: int, microbatches: int) -> None:
        """After a failure: what had no gradient has none, and ``error`` says what became of the others.

        Args:
            mixed: how many of the ``microbatches`` may have added to them.
        """
        for parameter in self._empty:
            parameter.grad = None
        others = len({*self._parameters}) - len({*self._empty})  # stages may share some
        if others and mixed:
            add_note(
                error,
                f"the .grad of {others} parameters held gradients before this step, and now may also hold those "
                f"of up to {mixed} of its {microbatches} micro-batches; call zero_grad() before the next step",
            )


def _entering(batches: Sequence[Batch]) -> list[Activation]:
    """The micro-batches as the first stage takes them, whose memory is the caller's."""
    tie = KEPT | SEEN if overlap(batches) else KEPT
    return [
        Activation(batch.value.detach().requires_grad_(batch.value.requires_grad), ties=(tie,))
        if isinstance(batch.value, Tensor)
        else _entered(batch, tie)
        for batch in batches
    ]


def _entered(batch: Batch, tie: int) -> Activation:
    leaves = detach_leaves(Activation(_packed(batch)))
    return with_ties(leaves, [tie | own for own in ties_of(flag_aliases(leaves, leaves))])


def _packed(batch: Batch) -> Any:
    """Packed, if each gradient that comes back is one of a tensor in ``batch``."""
    value, own = packed(batch.value), [id(tensor) for tensor in batch]
    whole = not isinstance(value, Aliased) or all(id(s) in own for s in value.sources if s.requires_grad)
    return value if whole else batch.value


def _spread(entering: Sequence[Activation], gradients: Sequence[list[Tensor | None]]) -> list[list[Tensor | None]]:
    """The gradients of all tensors of the caller, given those of what they were packed in."""
    return [
        each.value.spread(own) if isinstance(each.value, Aliased) else own
        for each, own in zip(entering, gradients, strict=True)
    ]


def _flowing(
    batches: Sequence[Batch], gradients: Sequence[list[Tensor | None]], scale: Scale
) -> tuple[list[Tensor], list[Tensor]]:
    """What of the micro-batches was computed with grad, and ``scale`` times its gradients."""
    flowing = [
        (tensor, scaled(gradient, scale))
        for batch, each in zip(batches, gradients, strict=True)
        for tensor, gradient in zip(batch, each, strict=True)
        if gradient is not None and tensor.requires_grad  # a layer may have made its leaf require grad
    ]
    return [tensor for tensor, _ in flowing], [gradient for _, gradient in flowing]
