"""One run of a pipeline: all cells of one mini-batch, computed by the workers in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from streams import AbstractStream, Context, CPUStream, current_stream, use_stream, wait_stream

from .._current import current
from .._torch import backward_id, is_profiled
from ..checkpoint._random import RunRNG, interception
from ..schedule import Action, Step, Walk
from ..transport._link import Channel, Link
from ..transport._ports import Ports
from ..values._describe import Cancelled
from ..values._leaves import Activation
from ._autograd_calls import accumulate_whole
from ._capture import expect_no_capture
from ._deferred_gradients import summed
from ._exclusive import involved, serving
from ._failures import Failures
from ._losses import Losses
from ._mini_batch import MiniBatch, callers_context
from ._scale import Scale
from ._settings import Observer, settings
from ._stage import Stage
from ._stage_runner import ACTIONS, StageRunner
from ._sweep import FREE_THREADED
from ._tied import Tied
from ._walks import Size
from ._workers import Workers


class Share(Protocol):
    """The part of a pipeline that is in this process: the whole of it, or some stages.

    Attributes:
        stages: the stages in this process, in order.
        count: the number of stages in all processes.
        devices: the device of each of ``stages``.
        on_accelerator: whether any of the devices queues its work on streams.
        placement: the worker of each stage of the pipeline, in any process.
        workers: the threads that compute ``stages``.
        threads: the same; None if the caller's thread computes all of them.
        line: the worker whose steps the caller's thread takes then.
        lines: the worker of each stage, as a timeline shows them.
    """

    stages: Sequence[Stage]
    count: int
    devices: list[torch.device]
    on_accelerator: bool
    workers: Workers
    line: int

    @property
    def placement(self) -> tuple[int, ...]: ...

    @property
    def threads(self) -> Workers | None: ...

    @property
    def lines(self) -> tuple[int, ...]: ...

    def halves(self, size: Size) -> tuple[Walk, Walk]:
        """The steps of all workers for a forward, and those for a backward, of a mini-batch of this size."""

    def random_numbers(self) -> RunRNG:
        """The random number generators of a new run."""

    def tied_elsewhere(self, stage: Stage) -> list[Tensor]:
        """The leaves of ``stage`` that stages in other processes use too: gradients are summed over the processes."""

    def failures(self) -> Failures:
        """An object that collects the failures of a new run."""

    def channels(self, streams: Sequence[AbstractStream], link: type[Link[Any]], failures: Failures) -> Connections:
        """The channels of a new run whose stages compute on ``streams``."""


class Connections(Protocol):
    """The channels of a run.

    Attributes:
        entrance, exit: the channels between the caller and the first stage, and the last stage and the caller.
        arrivals: the channel into each stage in this process.
        departures: the channel out of each.
    """

    entrance: Channel
    exit: Channel

    @property
    def arrivals(self) -> Mapping[int, Channel | Ports]: ...

    @property
    def departures(self) -> Mapping[int, Channel | Ports]: ...

    def cancel(self) -> None:
        """Cancel what anybody waits for, and will wait for."""


class Run:
    """One mini-batch on its way through the stages and back.

    The owner of the run puts values in at the entrance and takes them out at the exit; gradients go the other way.

    Args:
        share: whose stages and workers these are.
        microbatches: how many there are.
        checkpoint_stops: of each stage; micro-batches below it are checkpointed.
        loss: where micro-batches end, or turn around, if they do so inside the run.
        observer: wants to know of this run, unless somebody does who wants to know of every run.

    Attributes:
        mini_batch: the same, as its cells see it.
        observer: what looks at this run, if anybody wants to know of it.
    """

    def __init__(
        self,
        share: Share,
        microbatches: int,
        checkpoint_stops: tuple[int, ...],
        loss: Losses | None = None,
        observer: Observer | None = None,
    ) -> None:
        stages, chosen = share.stages, settings()
        observer = chosen.observer or observer
        self.mini_batch = MiniBatch(
            stages, share.placement, microbatches, checkpoint_stops, loss, share.random_numbers()
        )
        if loss is not None:
            loss.begin(self.mini_batch.rng, stages[-1].numbers.stop)
        self._share = share
        self._workers = share.threads
        self._line = share.line
        self._devices = share.devices
        self._on_accelerator = share.on_accelerator
        if self._on_accelerator:
            expect_no_capture(self._devices)
        self._streams = self._current_streams() if self._on_accelerator else [CPUStream] * len(stages)
        self.observer = None if observer is None else observer.begin(share.lines)
        self._failures = share.failures()
        self._channels = share.channels(
            self._streams, Link if self.observer is None else self.observer.link, self._failures
        )
        self._stream_of = {stage.index: stream for stage, stream in zip(stages, self._streams, strict=True)}
        self._tied = Tied(stages)
        # Makes a context in which the modules of each stage hold its tensors.
        self._applied: Callable[[], AbstractContextManager[None]] = (
            self._tied.applied if self._tied.shares else nullcontext
        )
        found = [
            StageRunner(
                self.mini_batch,
                stage,
                self._arrival(stage),
                self._departure(stage),
                [*tied, *share.tied_elsewhere(stage)],
            )
            for stage, tied in zip(stages, self._tied.leaves, strict=True)
        ]
        self._recomputations = [each for runner in found for each in runner.recomputations]
        self._runners = {runner.stage.index: runner for runner in found}

    def _arrival(self, stage: Stage) -> Channel | Ports:
        return self._channels.arrivals[stage.index]

    def _departure(self, stage: Stage) -> Channel | Ports | Losses:
        last = self._share.count - 1
        loss = self.mini_batch.loss
        return loss if loss is not None and stage.index == last else self._channels.departures[stage.index]

    def _sweep(self) -> None:
        """When the last reference to this run goes: have the workers free what they allocated for it."""
        workers = self.__dict__.get("_workers")
        if workers is not None:
            self.__dict__.clear()  # now, so that the workers find it
            workers.sweep()

    if FREE_THREADED:
        __del__ = _sweep

    def _current_streams(self) -> list[AbstractStream]:
        """The streams that are current in this thread, on the device of each stage."""
        return [current_stream(device) for device in self._devices]

    def forward(self, inputs: Sequence[Activation]) -> list[Activation]:
        """The outputs of all micro-batches, as leaves. Those through which a backward can pass require grad."""
        self.evaluate(inputs)
        return [self._channels.exit.get_values(i) for i in range(self.mini_batch.microbatches)]

    def evaluate(self, inputs: Sequence[Activation]) -> None:
        """Compute the forwards. The outputs are then in the exit channel, or in the losses."""
        for i, each in enumerate(inputs):
            self._channels.entrance.put_values(i, each)
        self._walk(self._share.halves(self.mini_batch.size)[0], self.mini_batch.context)
        if self._recomputations:
            with self._applied():  # no stage computes now
                for recomputation in self._recomputations:
                    recomputation.finish()

    def backward(
        self, gradients: Sequence[list[Tensor | None]], left: Sequence[Tensor] = ()
    ) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        """Compute the backwards, and add to ``.grad`` of all parameters but those that are ``left``.

        Args:
            gradients: those of the outputs, by micro-batch and tensor.
            left: parameters whose gradients the caller adds.

        Returns:
            The gradients of the inputs, by micro-batch and tensor; and those of the parameters that are ``left``.
        """
        if self._recomputations:
            with self._applied():
                for recomputation in self._recomputations:
                    recomputation.begin()
        now = self._current_streams() if self._on_accelerator else self._streams
        _all_wait(self._streams, now)
        for i, each in enumerate(gradients):
            self._channels.exit.put_gradients(i, each)
        self.mini_batch.rng.begin()
        try:
            self._walk(self._share.halves(self.mini_batch.size)[1], callers_context())
        finally:  # also of a failure the caller may see .grad, and zero it
            _all_wait(now, self._streams)
        whole = dict(zip(*self.whole(), strict=True))
        own = [whole.pop(parameter, None) for parameter in left]
        if whole:
            accumulate_whole(list(whole), list(whole.values()))
        return [self._channels.entrance.get_gradients(i) for i in range(self.mini_batch.microbatches)], own

    def train(self, inputs: Sequence[Activation], walk: Walk) -> list[list[Tensor | None]]:
        """Compute forwards and backwards in the order of ``walk``.

        Gradients that were accumulated outside ``.grad`` are then complete: see :meth:`whole`.

        Returns:
            The gradients of the inputs, by micro-batch and tensor.
        """
        for i, each in enumerate(inputs):
            self._channels.entrance.put_values(i, each)
        split = {step.stage for steps in walk for step in steps if step.action.kind == "backward_input"}
        for j in split & self._runners.keys():
            self._runners[j].look_for_hooks()
        self._walk(walk, self.mini_batch.context)
        return [self._channels.entrance.get_gradients(i) for i in range(len(inputs))]

    def parts(self) -> list[tuple[int, Tensor, Tensor]]:
        """End the accumulation outside ``.grad``: put ``.grad`` and hooks back.

        Returns:
            The gradients that were accumulated outside ``.grad``, scaled, each with the number of its stage among those
            in this process, and its leaf. A leaf that several stages share has several, in the order of the stages.
        """
        loss = self.mini_batch.loss
        scale: Scale = 1.0 if loss is None else loss.scale
        outside = [pair for each in self.mini_batch.accumulated for pair in each.take(scale)]
        grown = [*self.mini_batch.deferred.give_back(scale), *outside]
        return self._tied.joined(grown) if self._tied.shares else [(0, *pair) for pair in grown]

    def whole(self) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves of :meth:`parts`, each once, and the sums of their gradients."""
        return summed((leaf, gradient) for _, leaf, gradient in self.parts())

    @property
    def mixed(self) -> int:
        """The number of micro-batches that may have added to gradients that were in ``.grad`` before the run."""
        return max(runner.mixed for runner in self._runners.values())

    def _walk(self, walk: Walk, context: Context) -> None:
        """Have every worker take its steps; raise the earliest failure if there is one."""
        self._failures.walk = walk
        try:
            # Workers leave autocast one after the other, and cells that recompute enter it anew.
            with self._applied(), self.mini_batch.context.casts_kept():
                self._run_all(walk, context)
                if self._failures.earliest is not None:
                    self._failures.raise_earliest()
        except BaseException:
            self.mini_batch.deferred.give_back()
            raise
        finally:
            self.mini_batch.rng.settle()

    def _run_all(self, walk: Walk, context: Context) -> None:
        if self._workers is None:
            with serving(involved()):
                self._do(walk[self._line], context)
        else:
            works = [partial(self._do, steps, context) for steps in walk]
            placement = self.mini_batch.size[-1]
            streams = [self._stream_of[placement.index(worker)] for worker in range(len(works))]
            self._workers.run(list(zip(streams, works, strict=True)), self._stop)

    def _do(self, steps: Sequence[Step], context: Context) -> None:
        """Take the steps of one worker, until one fails, or all that are left come after a failure elsewhere."""
        failures, runners = self._failures, self._runners
        do = self._unusual_way()
        step, outer = steps[0], (current.step, current.microbatch, current.statistics, current.rng, current.graph_task)
        try:
            with context.applied(), interception.on():
                current.statistics = current.rng = None
                current.graph_task = backward_id()
                for step in steps:
                    stage, action = current.step = step
                    current.microbatch = action.microbatch
                    if failures.earliest is not None and failures.forestall(step):
                        return
                    if do is None:
                        ACTIONS[action.kind](runners[stage], action.microbatch)
                    else:
                        do(runners[stage], action)
        except Cancelled:
            return
        except BaseException as error:
            failures.add(step, error)
            self._channels.cancel()
            runners[step.stage].annotate(error, step.action)
        finally:
            # Restore those of an outer run: with inline(), a layer may run a pipeline in the same thread.
            current.step, current.microbatch, current.statistics, current.rng, current.graph_task = outer

    def _unusual_way(self) -> Callable[[StageRunner, Action], None] | None:
        """A function that does an action where it is profiled, observed, or not on the stage's stream."""
        do = _labelled if is_profiled() else None
        if self.observer is not None:
            do = self.observer.do
        if self._workers is None and self._on_accelerator:
            return partial(self._do_on_stream, do or StageRunner.do)
        return do

    def _do_on_stream(self, do: Callable[[StageRunner, Action], None], runner: StageRunner, action: Action) -> None:
        # Worker threads stay on the stream of their stage; the caller's thread may start the backward on another stream
        # than the forward. A recomputation would then be queued there, and later work on the stage's stream would not
        # wait for it.
        with use_stream(self._stream_of[runner.stage.index]):
            do(runner, action)

    def _stop(self) -> None:
        """Make every worker stop soon."""
        self._failures.stop()
        self._channels.cancel()


def _labelled(runner: StageRunner, action: Action) -> None:
    with torch.profiler.record_function(f"gpipe {action}@{runner.stage.index}"):
        runner.do(action)


def _all_wait(sources: Sequence[AbstractStream], targets: Sequence[AbstractStream]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source is not target:  # as on the CPU
            wait_stream(source, target)
