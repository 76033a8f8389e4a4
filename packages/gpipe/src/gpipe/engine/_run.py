"""One run: the lanes of all stages, the channels between them, and the workers that walk their programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from microbatch import Batch
from streams import AbstractStream, Context, current_stream, wait_stream

from ..checkpoint._random import RunRandom
from ..schedule import Action, Schedule, Step, Walk, fill_drain, halves, named, validate
from ..skip import SkipLayout
from ..timeline._record import WatchedLink, recorder
from ..transport._channels import Wiring
from ..transport._copy import Place
from ..transport._link import Channel, Link
from ..values._describe import Poisoned
from ._accumulate import Grown
from ._deferred_gradients import HeldGradients, summed
from ._exclusive import involved, serving
from ._failures import Failures
from ._inline import is_inline
from ._kept_nodes import kept
from ._loss import LossEnd
from ._stage import Stage
from ._stage_runner import Lane
from ._workers import Workers

_log = logging.getLogger("gpipe")


class Run:
    """One mini-batch on its way through the stages and back.

    The owner of the run puts values in at the entrance and takes them out at the exit; gradients go the other way.

    Attributes:
        kept: parameters with a node in autograd that somebody keeps, which must run once, with the whole gradient.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        copy_streams: Sequence[AbstractStream],
        workers: Workers,
        microbatches: int,
        checkpoint_stop: int,
        layout: SkipLayout,
        end: LossEnd | None = None,
    ) -> None:
        self._workers = workers
        self._microbatches = microbatches
        self._context = _callers_context()
        self._devices = [stage.device for stage in stages]
        self._streams = [current_stream(device) for device in self._devices]
        self._inline = is_inline()
        self._placement = (0,) * len(stages) if self._inline else workers.placement
        self._checkpoint_stop = checkpoint_stop
        self._end = end
        recording = recorder()
        self._recorder = None if recording is None else recording.begin(workers.placement)
        self._failures = Failures()
        places = [Place(*each) for each in zip(self._devices, self._streams, copy_streams, strict=True)]
        link = Link if self._recorder is None else WatchedLink
        self._wiring = Wiring(places, layout, partial(Channel, link=link, hopeless=self._failures.forestall))
        self._random = RunRandom()
        self._held = HeldGradients() if end is None else end.held
        self._grown = [] if end is None else [end.grown]
        self.kept = kept(p for stage in stages for p in stage.module.parameters()) if torch.is_grad_enabled() else []
        self._lanes = [self._lane(stage, end if stage is stages[-1] else None) for stage in stages]

    def _lane(self, stage: Stage, end: LossEnd | None) -> Lane:
        stage.begin()
        return Lane(
            stage,
            self._wiring.arrival(stage.index),
            self._wiring.departure(stage.index) if end is None else end,
            microbatches=self._microbatches,
            checkpoint_stop=self._checkpoint_stop,
            keep=torch.is_grad_enabled(),
            context=self._context,
            random=self._random,
            held=self._held,
            grown=self._grow(stage),
            end=self._end,
        )

    def _grow(self, stage: Stage) -> Grown | None:
        """Where the gradients of ``stage`` accumulate, if it has a parameter that is kept."""
        own = {id(parameter) for parameter in stage.module.parameters()} if self.kept else set()
        if own.isdisjoint(map(id, self.kept)):
            return None
        self._grown.append(Grown())
        return self._grown[-1]

    def forward(self, batches: Sequence[Batch]) -> list[Batch]:
        """The outputs of all micro-batches, as leaves; those that a backward can start from require grad."""
        for i, batch in enumerate(batches):
            self._wiring.entrance.values.put(i, batch)
        self._walk(self._halves()[0], self._context)
        self._look_for_draws()
        return [self._wiring.exit.values.get(i) for i in range(self._microbatches)]

    def backward(
        self, gradients: Sequence[list[Tensor | None]]
    ) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        """Accumulate the gradients of all parameters but those that are ``kept``.

        Returns:
            The gradients of the inputs, by micro-batch and tensor; and those of the parameters that are kept.
        """
        now = [current_stream(device) for device in self._devices]
        _all_wait(self._streams, now)
        for i, each in enumerate(gradients):
            self._wiring.exit.gradients.put(i, each)
        self._walk(self._halves()[1], _callers_context())
        _all_wait(now, self._streams)
        whole = dict(zip(*self.whole(), strict=True))
        own = [whole.pop(parameter, None) for parameter in self.kept]
        torch.autograd.backward(list(whole), list(whole.values()))
        return [self._wiring.entrance.gradients.get(i) for i in range(self._microbatches)], own

    def train(self, batches: Sequence[Batch], walk: Walk) -> list[list[Tensor | None]]:
        """Forwards and backwards as ``walk`` says; the gradients of the inputs, by micro-batch and tensor.

        Those of leaves that were kept out of ``.grad`` are :meth:`whole` then.
        """
        for i, batch in enumerate(batches):
            self._wiring.entrance.values.put(i, batch)
        for j in {step.stage for steps in walk for step in steps if step.action.kind == "backward_input"}:
            self._lanes[j].stage.expect_split()
        try:
            self._walk(walk, self._context)
        finally:  # a refused recomputation promises that the next run knows who draws
            self._look_for_draws()
        _all_wait([current_stream(device) for device in self._devices], self._streams)
        return [self._wiring.entrance.gradients.get(i) for i in range(self._microbatches)]

    def whole(self) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves that were kept out of ``.grad``, and their gradients, scaled; everything else is given back."""
        scale = 1.0 if self._end is None else self._end.scale
        grown = [pair for each in self._grown for pair in each.take(scale)]
        return summed([*self._held.give_back(scale), *grown])

    @property
    def mixed(self) -> int:
        """How many micro-batches may have added to gradients that were there before."""
        return max(lane.mixed for lane in self._lanes)

    def _halves(self) -> tuple[Walk, Walk]:
        return _halves(self._microbatches, self._checkpoint_stop, self._placement)

    def walk(self, schedule: Schedule | str) -> Walk:
        """What each worker does under ``schedule``. ValueError if there is none of this name, or it does not fit."""
        if isinstance(schedule, str):
            return _named(schedule, self._microbatches, self._checkpoint_stop, self._placement)
        if not isinstance(schedule, Schedule):
            raise TypeError(
                f"schedule must be a name such as '1f1b', or a gpipe.schedule.Schedule; got {type(schedule).__name__}"
            )
        validate(schedule, self._microbatches, self._placement)
        return schedule.recomputing(self._checkpoint_stop).on(self._placement)

    def _walk(self, walk: Walk, context: Context) -> None:
        """Let every worker walk its steps; raise the earliest failure if there is any."""
        self._failures.begin(walk)
        try:
            self._run_all(walk, context)
            self._failures.raise_earliest()
        except BaseException:
            self._held.give_back()
            raise

    def _run_all(self, walk: Walk, context: Context) -> None:
        works = [partial(self._do, steps, context) for steps in walk]
        if self._inline:
            with serving(involved()):
                works[0]()
        else:
            streams = [self._streams[self._placement.index(worker)] for worker in range(len(works))]
            self._workers.run(list(zip(streams, works, strict=True)), self._stop)

    def _do(self, steps: Sequence[Step], context: Context) -> None:
        """Walk the steps of one worker, until one fails, or nothing is left that comes before a failure."""
        failures = self._failures
        step = steps[0]
        try:
            with context.applied():
                do = self._doing()
                for step in steps:
                    if failures.before(step):
                        return
                    do(self._lanes[step.stage], step.action)
        except Poisoned:
            return
        except BaseException as error:
            failures.add(step, error)
            self._wiring.poison()
            self._lanes[step.stage].annotate(error, step.action)

    def _doing(self) -> Callable[[Lane, Action], None]:
        if self._recorder is not None:
            return self._recorder.do
        return _labelled if torch.autograd.profiler._is_profiler_enabled else Lane.do

    def _look_for_draws(self) -> None:
        if self._random.moved():
            for lane in self._lanes:
                lane.stage.forget_draws()

    def _stop(self) -> None:
        """Make every worker come to an end soon."""
        self._failures.stop()
        self._wiring.poison()


@lru_cache(maxsize=64)
def _halves(microbatches: int, checkpoint_stop: int, placement: tuple[int, ...]) -> tuple[Walk, Walk]:
    """What the workers do before the caller gets the outputs, and after it gave the gradients."""
    forwards, backwards = halves(fill_drain(microbatches, len(placement), checkpoint_stop))
    return forwards.on(placement), backwards.on(placement)


@lru_cache(maxsize=64)
def _named(name: str, microbatches: int, checkpoint_stop: int, placement: tuple[int, ...]) -> Walk:
    if name.lower() == "interleaved" and 1 < len(placement) == len(set(placement)):
        _log.warning(  # once for each number of stages and micro-batches: what this returns is kept
            "schedule='interleaved' has nothing to interleave, because each of the %d partitions has a worker of its "
            "own, and so it is a '1f1b' that holds more; give each worker several partitions, as with "
            "devices=[0, 1, 0, 1], or on the CPU devices=['cpu:0', 'cpu:1'] * 2",
            len(placement),
        )
    return named(name, microbatches, placement, checkpoint_stop).on(placement)


def _callers_context() -> Context:
    """What this thread sees, except that every backward inside a layer or cell stays on its worker."""
    with torch.autograd.set_multithreading_enabled(False):
        return Context.capture()


def _labelled(lane: Lane, action: Action) -> None:
    with torch.profiler.record_function(f"gpipe {action}@{lane.stage.index}"):
        lane.do(action)


def _all_wait(sources: Sequence[AbstractStream], targets: Sequence[AbstractStream]) -> None:
    for source, target in zip(sources, targets, strict=True):
        wait_stream(source, target)
