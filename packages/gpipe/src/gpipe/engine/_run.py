"""One run of a pipeline: workers compute all cells of a mini-batch in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from streams import AbstractStream, Context, CPUStream, current_stream, use_device, use_stream, wait_stream

from .._current import Work, current
from .._torch import backward_id, is_intercepting, is_profiled, set_intercepting
from ..checkpoint._module_snapshot import ModuleSnapshot
from ..checkpoint._parametrized import has_cache, own_cache
from ..checkpoint._random import CellRNG, RunRNG
from ..schedule import Action, Step, WorkerSteps
from ..transport._copy import StagePlace
from ..transport._transport import Transport
from ..values._describe import Cancelled
from ..values._leaves import Activation
from ._accumulate import DeferredGradients, GradientSums, add_to, find_kept
from ._autograd_calls import accumulate_whole
from ._explained import explain_error
from ._failures import Failures
from ._leaked_graphs import expect_no_variables, watch_attributes
from ._offloaded import Offloaded
from ._pipeline import Pipeline
from ._processes import RunState
from ._run_lock import RunLocks, locks_of_thread, serving
from ._saved import Leaving, SavedTensors
from ._scale import Scale, scale_gradient
from ._spec import RunSpec
from ._stage import Stage
from ._stage_run import StageRun, Trained
from ._tied import Tied, collect_contents

Around = Callable[[Stage, Action], AbstractContextManager[None]]
"""Returns the context in which a stage takes an action."""


class Run:
    """One mini-batch on its way through the stages and back, according to ``spec``.

    Attributes:
        state: the part of the run that other processes can read.
        parameters: the parameters of all stages in this process, if the run has backwards.
        kept_nodes: parameters with an ``AccumulateGrad`` node that other code holds; it must run once, with the
            complete gradient.
        deferred, sums: hold ``.grad`` and hooks of leaves, and gradients outside ``.grad``.
    """

    def __init__(self, pipeline: Pipeline, spec: RunSpec) -> None:
        if pipeline.on_accelerator:
            expect_no_capture({*pipeline.devices})
        self._pipeline, self._spec = pipeline, spec
        observer = None if spec.observer is None else spec.observer.begin(pipeline.lines)
        self.state = RunState(spec.trains, Failures(), RunRNG(spec.seed), spec.loss, observer)
        found = [collect_contents(stage.module) for stage in pipeline.stages]
        own = [part.parameters for part in found] if spec.trains else [[]] * len(found)
        self.parameters = [*chain.from_iterable(own)]
        if pipeline.offloaded and spec.updates is None:
            pipeline.expect_room_for_gradients(self.parameters)
        self.kept_nodes: list[Tensor] = find_kept(self.parameters)
        # Stages and loss share this object, so that a leaf used by both is held and restored once.
        self.deferred = DeferredGradients()
        self.sums: list[GradientSums] = []
        self._streams = self._current_streams() if pipeline.on_accelerator else [CPUStream] * len(found)
        self._offloaded = [*map(self._build_offloaded, pipeline.stages, self._streams)]
        self._leaving: dict[int, Leaving] = {}
        self._tied = Tied(pipeline.stages, found, self._offloaded)
        if spec.loss is not None:
            self.sums.append(GradientSums())
            # The loss draws random numbers like a layer after the last one.
            random = partial(CellRNG, self.state.rng, first=pipeline.stages[-1].numbers.stop)
            spec.loss.begin(random, self._tied, self.deferred, self.sums[0], trains=spec.trains)
        at = zip(pipeline.devices, self._streams, pipeline.copy_streams, strict=True)
        places = {stage.index: place for stage, place in zip(pipeline.stages, at, strict=True)}
        self._transport = self._new_transport(places)
        if spec.updates is not None:
            loss = spec.loss
            assert loss is not None
            spec.updates.begin(self._tied.offloaded, self._tied, self.sums, lambda: loss.scale)
        self._stage_runs = pipeline.stage_runs(spec, self.state.rng, self._transport, self._tied, self.deferred)
        self._stages = {stage.index: self._stage_run(at, stage, own[at]) for at, stage in enumerate(pipeline.stages)}
        self._recomputed = [each.stage for each in self._stages.values() if each.recomputes]
        self._then: list[ModuleSnapshot] = []

    def _new_transport(self, places: Mapping[int, StagePlace]) -> Transport:
        pipeline, processes = self._pipeline, self._pipeline.processes
        return Transport(
            places,
            pipeline.count,
            pipeline.layout,
            is_cancelled=self.state.failures.forestall_current,
            remote=partial(processes.channel, run=self.state),
            got=None if self.state.observer is None else self.state.observer.got,
        )

    def _stage_run(self, at: int, stage: Stage, parameters: Sequence[nn.Parameter]) -> StageRun:
        """Return the run of ``stage``, which has index ``at`` among the stages of this process."""
        j, sums = stage.index, None
        if not {*map(id, self.kept_nodes)}.isdisjoint(map(id, parameters)):
            sums = GradientSums()
            self.sums.append(sums)
        tied = [*self._tied.leaves[at], *self._pipeline.processes.find_shared(stage.module)]
        saving = self._saving(at, stage) if j in self._spec.size.offloading else None
        trained = Trained(parameters, tied, self.deferred, sums, self._offloaded[at], saving)
        random = CellRNG(self.state.rng, 0, stage.numbers.start, module=stage.module)
        is_last = j == self._pipeline.count - 1
        departure = self._spec.loss if self._spec.loss is not None and is_last else self._transport.departures[j]
        return self._stage_runs.of(self._spec, stage, random, self._transport.arrivals[j], departure, trained)

    def _build_offloaded(self, stage: Stage, stream: AbstractStream) -> Offloaded | None:
        if stage.guests is None:
            return None
        return Offloaded(stage.guests, stage.device, self._pipeline.host_link(stage.device), stream)

    def _saving(self, at: int, stage: Stage) -> Callable[[], SavedTensors]:
        """Return a function that makes the object that collects what a cell of ``stage`` saves."""
        leaving = self._leaving.setdefault(self._pipeline.lines[stage.index], Leaving())
        link = self._pipeline.host_link(stage.device)
        return partial(SavedTensors, stage.device, link, self._streams[at], leaving)

    def _current_streams(self) -> list[AbstractStream]:
        return [current_stream(device) for device in self._pipeline.devices]

    def forward(self, inputs: Sequence[Activation]) -> list[Activation]:
        """Return the outputs of all micro-batches as leaves; none if the last stage is in a different process."""
        self.evaluate(inputs)
        if self._spec.trains and not any(tensor.requires_grad for each in inputs for tensor in each.tensors):
            watch_attributes(self._pipeline.stages[0])
        microbatches = self._spec.size.microbatches if self._pipeline.ends else 0
        return [self._transport.exit.get_values(i) for i in range(microbatches)]

    def evaluate(self, inputs: Sequence[Activation]) -> None:
        """Compute all forwards, and the loss if the run has one."""
        self._transport.entrance.values.update(enumerate(inputs))
        self._run_steps(self._spec.worker_steps)
        if self._recomputed:
            with self._tied.applied():  # no stage is computing now
                self._then = [ModuleSnapshot(stage.recomputed) for stage in self._recomputed]

    def backward(
        self, gradients: Sequence[list[Tensor | None]], left: Sequence[Tensor] = ()
    ) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        """Run the backwards, and accumulate into ``.grad``; return the gradients of parameters in ``left`` instead.

        ``gradients`` of the outputs, and the returned gradients of the inputs, are listed by micro-batch and tensor.
        """
        if self._recomputed:
            with self._tied.applied():
                for then in self._then:
                    then.expect_same()
        # The caller may now use different streams than in the forward, and computes its gradients on them.
        now = self._current_streams() if self._pipeline.on_accelerator else self._streams
        _all_wait(self._streams, now)
        self._transport.exit.gradients.update(enumerate(gradients))
        self.state.rng.begin()
        context = Context.capture()
        try:
            self._run_steps(self._spec.later, context, self._spec.context.over(context))
        finally:  # even after a failure, the caller may read or zero .grad
            _all_wait(now, self._streams)
        # The streams of this thread now wait for the stages' streams, which computed the gradients.
        whole = self.whole()
        own = [whole.pop(parameter, None) for parameter in left]
        if whole:
            accumulate_whole(whole.items())
        return [self._transport.entrance.get_gradients(i) for i in range(len(gradients))], own

    def train(self, inputs: Sequence[Activation]) -> list[list[Tensor | None]]:
        """Compute forwards, losses and backwards; return the gradients of the inputs.

        Gradients accumulated outside ``.grad`` are then complete: see :meth:`whole`.
        """
        self._transport.entrance.values.update(enumerate(inputs))
        self._run_steps(self._spec.worker_steps)
        return [self._transport.entrance.get_gradients(i) for i in range(len(inputs))]

    def whole(self) -> dict[Tensor, Tensor]:
        """Restore ``.grad`` and hooks; return the scaled gradient of each leaf that was accumulated outside ``.grad``.

        Gradients of a leaf that several stages share are added in the order of the stages.
        """
        scale: Scale = 1.0 if self._spec.loss is None else self._spec.loss.scale
        outside = [pair for each in self.sums for pair in each.take(scale)]
        updates = self._spec.updates
        home = self._tied.offloaded.values()
        found = updates.wait() if updates is not None else [pair for each in home for pair in each.take()]
        arrived = [(leaf, scale_gradient(each, scale)) for leaf, each in found]
        gradients = [*self.deferred.give_back(scale), *arrived, *outside]
        return add_to({}, self._tied.map_to_owners(gradients) if self._tied.shares else gradients)

    @property
    def adds(self) -> bool:
        """True if a backward may have accumulated into an existing ``.grad``."""
        return any(stage.adds for stage in self._stages.values())

    def _run_steps(
        self,
        worker_steps: WorkerSteps,
        context: Context | None = None,
        recompute_under: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Have every worker take its steps in ``worker_steps``; raise the earliest failure, if any.

        The caller restores ``.grad`` and hooks, because an interrupt may arrive even after this method.

        Args:
            context: the settings for workers; by default those captured for the forward.
            recompute_under: returns the context of a recomputation.
        """
        failures = self.state.failures
        failures.worker_steps = worker_steps
        run_locks = locks_of_thread()
        try:
            # Workers leave autocast at different times, and recomputations enter it again.
            with self._tied.applied(), self._spec.context.casts_kept(), self._stage_runs.walking():
                if self._spec.inline:  # this thread already has its settings
                    own = worker_steps[self._pipeline.processes.me or 0]
                    self._take(own, nullcontext(), run_locks, recompute_under)
                else:
                    self._have_workers_take(worker_steps, context or self._spec.context, run_locks, recompute_under)
                if failures.earliest is not None:
                    failures.raise_earliest()
        finally:
            for offloaded in filter(None, self._offloaded):
                offloaded.leave()
            for leaving in self._leaving.values():
                leaving.free()
            for stage in self._stages.values() if self._leaving else ():
                stage.leave()
            self.state.rng.settle()

    def _have_workers_take(
        self,
        worker_steps: WorkerSteps,
        context: Context,
        run_locks: RunLocks,
        recompute_under: Callable[[], AbstractContextManager[None]],
    ) -> None:
        placement = self._spec.size.placement
        streams = [self._streams[placement.index(worker)] for worker in range(len(worker_steps))]
        works = [partial(self._take, steps, context.applied(), run_locks, recompute_under) for steps in worker_steps]
        self._pipeline.workers.run(list(zip(streams, works, strict=True)), self._stop)

    def _take(
        self,
        steps: Sequence[Step],
        context: AbstractContextManager[None],
        run_locks: RunLocks,
        recompute_under: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Take the steps of one worker until one fails, or until a failure elsewhere precedes all remaining steps."""
        failures, stages, around = self.state.failures, self._stages, self._around()
        step = steps[0]
        # These values of an outer run are restored: inside inline(), a layer may run a pipeline in the same thread.
        before, intercepted, graph_task = current.work, is_intercepting(), backward_id()
        try:
            current.work = base = Work(before.skips, step, graph_task, recompute_under=recompute_under)
            set_intercepting(True)
            # Backwards inside a layer or cell stay on this thread, since one of autograd's threads might wait for it.
            with context, serving(run_locks), torch.autograd.set_multithreading_enabled(False):
                variables, caches = copy_context(), has_cache(self._spec.context.variables)
                for step in steps:
                    if failures.earliest is not None and failures.should_skip(step):
                        return
                    j, (kind, i) = step
                    current.work = stages[j].work(base, step)
                    with nullcontext() if around is None else around(stages[j].stage, step.action), own_cache(caches):
                        getattr(stages[j], kind)(i)
                if not self._spec.inline:
                    expect_no_variables(variables)
        except Cancelled:  # the failure is elsewhere, and already recorded
            return
        except BaseException as error:
            # Add the failure before waking readers, because they check whether their step follows a failure.
            failures.add(step, self._explain_error(error, step))
            self._transport.cancel()
        finally:
            current.work = before
            set_intercepting(intercepted)

    def _explain_error(self, error: BaseException, step: Step) -> BaseException:
        stage, action = self._stages[step.stage], step.action
        inputs = stage.get_inputs(action.microbatch)
        return explain_error(error, stage.stage, action, self._spec.size.microbatches, inputs)

    def _around(self) -> Around | None:
        observing: Around | None = _labelling if is_profiled() else None
        if self.state.observer is not None:
            observing = self.state.observer.observing
        if self._spec.inline and self._pipeline.on_accelerator:
            streams = {stage.index: stream for stage, stream in zip(self._pipeline.stages, self._streams, strict=True)}
            return partial(_on_stream, streams, observing)
        return observing

    def _stop(self) -> None:
        self.state.failures.stop()
        self._transport.cancel()


@contextmanager
def _on_stream(
    streams: dict[int, AbstractStream], observing: Around | None, stage: Stage, action: Action
) -> Iterator[None]:
    # Worker threads stay on their stage's stream, but the caller may begin the backward on a different stream than the
    # forward. Recomputations would be queued on it, and later work on the stage's stream would not wait for them.
    with use_stream(streams[stage.index]), nullcontext() if observing is None else observing(stage, action):
        yield


def _labelling(stage: Stage, action: Action) -> Any:
    return torch.profiler.record_function(f"gpipe {action}@{stage.index}")


def _all_wait(sources: Sequence[AbstractStream], targets: Sequence[AbstractStream]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source is not target:  # always the same on the CPU
            wait_stream(source, target)


def expect_no_capture(devices: Iterable[torch.device]) -> None:
    for device in devices:
        # Torch reports a capture on the current device only, but any participating device may have one.
        with use_device(device):
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "a pipeline cannot be captured in a CUDA graph: its workers wait for each other on the host, which "
                    "a graph does not repeat; capture what is around it"
                )
