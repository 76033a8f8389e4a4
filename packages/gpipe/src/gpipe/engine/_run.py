"""One run of a pipeline: all cells of one mini-batch, computed by the workers in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from streams import AbstractStream, Context, CPUStream, current_stream, use_device, use_stream, wait_stream

from .._current import current, restore
from .._torch import backward_id, is_intercepting, is_profiled, set_intercepting
from ..checkpoint._layers_then import LayersThen
from ..checkpoint._random import RunRNG
from ..schedule import Action, Step, Walk
from ..transport._transport import Link
from ..values._describe import Cancelled
from ..values._leaves import Activation
from ._accumulate import DeferredGradients, add_to, kept
from ._autograd_calls import accumulate_whole
from ._exclusive import Sections
from ._failures import Failures
from ._left_behind import expect_no_variables, watch_attributes
from ._losses import Losses
from ._scale import Scale
from ._settings import Observer, settings
from ._stage_run import StageRun
from ._tied import Tied, contents_of
from ._walks import Size, backwards, forwards

if TYPE_CHECKING:
    from ._pipeline import Pipeline


class Run:
    """One mini-batch on its way through the stages and back.

    Args:
        checkpoint_stops: for each stage, the number below which micro-batches are checkpointed, if there is a backward.
        loss: computes the losses of micro-batches, if the run includes them.
        observer: observes this run, unless an observer of every run is set.

    Attributes:
        keeps: whether a backward follows; if not, no cell is kept.
        context: the settings of the thread that called the forward.
        kept_nodes: parameters whose ``AccumulateGrad`` node other code refers to; it must run once, with the whole
            gradient.
        deferred, sums: remove ``.grad`` and hooks of leaves, and accumulate their gradients meanwhile.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        microbatches: int,
        checkpoint_stops: tuple[int, ...],
        loss: Losses | None = None,
        observer: Observer | None = None,
    ) -> None:
        stages = pipeline.stages
        self._pipeline = pipeline
        self._workers = pipeline.threads
        self._on_accelerator = pipeline.on_accelerator
        if self._on_accelerator:
            expect_no_capture({*pipeline.devices})
        self.keeps = torch.is_grad_enabled()
        stops = checkpoint_stops if self.keeps else (0,) * len(checkpoint_stops)
        self.size = Size(microbatches, pipeline.placement, stops)
        self.context = Context.capture()
        self.rng = RunRNG(pipeline.processes.seed)
        found = [contents_of(stage.module) for stage in stages]
        self._tied = Tied(stages, found)
        self.loss = loss
        if loss is not None:
            # The loss draws as a layer behind the last one would.
            loss.begin(self.rng, stages[-1].numbers.stop, self._tied, trains=self.keeps)
        own = [part.parameters for part in found] if self.keeps else [[]] * len(stages)
        self.parameters = [*chain.from_iterable(own)]
        self.kept_nodes: list[Tensor] = kept(self.parameters)
        # One for stages and loss: a leaf that both use is held once, and given back once.
        self.deferred = DeferredGradients() if loss is None else loss.deferred
        self.sums = [] if loss is None else [loss.sums]
        observer = settings().observer or observer
        self.observer = None if observer is None else observer.begin(pipeline.lines)
        self._streams = self._current_streams() if self._on_accelerator else [CPUStream] * len(stages)
        self.failures = Failures()
        link = Link if self.observer is None else self.observer.link
        self._transport = pipeline.transport(self._streams, link, self.failures, loss)
        self._stream_of = {stage.index: stream for stage, stream in zip(stages, self._streams, strict=True)}
        self._stages = self._stage_runs(own)
        self._recomputed = [each.stage.module for each in self._stages.values() if each.recomputes]
        self._then: list[LayersThen] = []

    def _stage_runs(self, parameters: Sequence[Sequence[nn.Parameter]]) -> dict[int, StageRun]:
        """The stages of this process in this run, by number, each with its own ``parameters``."""
        departures: dict[int, Any] = self._transport.departures
        if self.loss is not None and self._pipeline.ends:
            departures = {**departures, self._pipeline.count - 1: self.loss}
        found = {}
        for stage, own, tied in zip(self._pipeline.stages, parameters, self._tied.leaves, strict=True):
            j, shared = stage.index, [*tied, *self._pipeline.processes.shared(stage.module)]
            found[j] = StageRun(self, stage, self._transport.arrivals[j], departures[j], own, shared)
        return found

    def _current_streams(self) -> list[AbstractStream]:
        return [current_stream(device) for device in self._pipeline.devices]

    def forward(self, inputs: Sequence[Activation]) -> list[Activation]:
        """The outputs of all micro-batches, as leaves; none if the last stage is in another process."""
        self.evaluate(inputs)
        if self.keeps and not any(tensor.requires_grad for each in inputs for tensor in each.tensors):
            watch_attributes(self._pipeline.stages[0])
        return [self._transport.exit.get_values(i) for i in range(self.size.microbatches if self._pipeline.ends else 0)]

    def evaluate(self, inputs: Sequence[Activation]) -> None:
        self._transport.entrance.values.update(enumerate(inputs))
        self._walk(forwards(self.size, has_loss=self.loss is not None and self.loss.is_whole), self.context)
        if self._recomputed:
            with self._tied.applied():  # no stage computes now
                self._then = [*map(LayersThen, self._recomputed)]

    def backward(
        self, gradients: Sequence[list[Tensor | None]], left: Sequence[Tensor] = ()
    ) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        """Compute the backwards, and add to ``.grad`` of all parameters; those that are ``left`` are returned instead.

        The other result, and ``gradients``, those of the outputs, are by micro-batch and tensor.
        """
        if self._recomputed:
            with self._tied.applied():
                for then in self._then:
                    then.expect_same()
            settings_of_forward = self.context.over(Context.capture())
            for stage in self._stages.values():
                stage.forward_settings = settings_of_forward
        # The caller may be on other streams than in the forward, and its gradients are computed there.
        now = self._current_streams() if self._on_accelerator else self._streams
        _all_wait(self._streams, now)
        self._transport.exit.gradients.update(enumerate(gradients))
        self.rng.begin()
        try:
            self._walk(backwards(self.size))
        finally:  # also of a failure the caller may see .grad, and zero it
            _all_wait(now, self._streams)
        # By now the streams of this thread wait for those of the stages, where the gradients were computed.
        whole = self.whole()
        own = [whole.pop(parameter, None) for parameter in left]
        if whole:
            accumulate_whole(whole.items())
        return [self._transport.entrance.get_gradients(i) for i in range(self.size.microbatches)], own

    def train(self, inputs: Sequence[Activation], walk: Walk) -> list[list[Tensor | None]]:
        """Compute forwards and backwards in the order of ``walk``; return the gradients of the inputs.

        Gradients that were accumulated outside ``.grad`` are then complete: see :meth:`whole`.
        """
        self._transport.entrance.values.update(enumerate(inputs))
        split = {step.stage for steps in walk for step in steps if step.action.kind == "backward_input"}
        for j in split & self._stages.keys():
            self._stages[j].look_for_hooks()
        self._walk(walk, self.context)
        return [self._transport.entrance.get_gradients(i) for i in range(len(inputs))]

    def whole(self) -> dict[Tensor, Tensor]:
        """End the accumulation outside ``.grad``: put that and hooks back; return the scaled gradient of each leaf.

        Gradients of a leaf that several stages share are added in the order of the stages.
        """
        scale: Scale = 1.0 if self.loss is None else self.loss.scale
        outside = [pair for each in self.sums for pair in each.take(scale)]
        gradients = [*self.deferred.give_back(scale), *outside]
        return add_to({}, self._tied.joined(gradients) if self._tied.shares else gradients)

    @property
    def adds(self) -> bool:
        """Whether backwards may have added to gradients that were in ``.grad`` before."""
        return any(stage.adds for stage in self._stages.values())

    def _walk(self, walk: Walk, context: Context | None = None) -> None:
        """Have every worker take its steps in ``walk``; raise the earliest failure if there is one.

        Then whoever began the run gives ``.grad`` and hooks back: an interrupt may also come after this method.
        """
        self.failures.walk = walk
        sections = current.serves + current.holds
        try:
            # Workers leave autocast one after the other, and cells that recompute enter it anew.
            with self._tied.applied(), self.context.casts_kept():
                if self._workers is None:  # this thread, which has its settings
                    self._do(walk[self._pipeline.processes.me or 0], nullcontext(), sections)
                else:
                    applied = (context or Context.capture()).applied
                    works = [partial(self._do, steps, applied(), sections) for steps in walk]
                    streams = [self._stream_of[self.size.placement.index(worker)] for worker in range(len(works))]
                    self._workers.run(list(zip(streams, works, strict=True)), self._stop)
                if self.failures.earliest is not None:
                    self.failures.raise_earliest()
        finally:
            self.rng.settle()

    def _do(self, steps: Sequence[Step], context: AbstractContextManager[None], sections: Sections) -> None:
        """Take the steps of one worker, until one fails, or all that are left come after a failure elsewhere.

        ``sections`` are those that cannot be left before.
        """
        failures, stages = self.failures, self._stages
        do = self._action_wrapper()
        step = steps[0]
        # Those of an outer run are restored: with inline(), a layer may run a pipeline in the same thread.
        before, intercepted = {**vars(current)}, is_intercepting()
        try:
            current.step, current.graph_task, current.serves = step, backward_id(), sections
            current.microbatch = current.statistics = current.rng = None
            # This thread holds nothing meanwhile: to enter what it held would be to wait for itself, and is refused.
            current.holds = ()
            set_intercepting(True)
            # Backwards inside a layer or cell stay on their worker: on a thread of autograd they might wait for it.
            with context, torch.autograd.set_multithreading_enabled(False):
                variables = copy_context()
                for step in steps:
                    j, action = current.step = step
                    current.microbatch = action.microbatch
                    if failures.earliest is not None and failures.forestall(step):
                        return
                    if do is None:
                        getattr(stages[j], action.kind)(action.microbatch)
                    else:
                        do(stages[j], action)
                if self._workers is not None:
                    expect_no_variables(variables)
        except Cancelled:  # by a failure elsewhere, which is recorded already
            return
        except BaseException as error:
            # First the failure, then the wake-up: a reader that wakes looks whether its step comes after a failure.
            failures.add(step, stages[step.stage].explained(error, step.action))
            self._transport.cancel()
        finally:
            set_intercepting(intercepted)
            restore(before)

    def _action_wrapper(self) -> Callable[[StageRun, Action], None] | None:
        do: Callable[[StageRun, Action], None] | None = _labelled if is_profiled() else None
        if self.observer is not None:
            do = self.observer.do
        if self._workers is None and self._on_accelerator:
            return partial(self._do_on_stream, do or StageRun.do)
        return do

    def _do_on_stream(self, do: Callable[[StageRun, Action], None], stage: StageRun, action: Action) -> None:
        # Worker threads stay on the stream of their stage; the caller's thread may start the backward on another stream
        # than the forward. A recomputation would then be queued there, and later work on the stage's stream would not
        # wait for it.
        with use_stream(self._stream_of[stage.stage.index]):
            do(stage, action)

    def _stop(self) -> None:
        self.failures.stop()
        self._transport.cancel()


def _labelled(stage: StageRun, action: Action) -> None:
    with torch.profiler.record_function(f"gpipe {action}@{stage.stage.index}"):
        stage.do(action)


def _all_wait(sources: Sequence[AbstractStream], targets: Sequence[AbstractStream]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source is not target:  # as on the CPU
            wait_stream(source, target)


def expect_no_capture(devices: Iterable[torch.device]) -> None:
    for device in devices:
        # Torch answers for the current device, and a capture may be on any of those that take part.
        with use_device(device):
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a pipeline cannot be captured in a CUDA graph: its workers wait for each other on the host, which "
                    "a graph does not repeat; capture what is around it"
                )
