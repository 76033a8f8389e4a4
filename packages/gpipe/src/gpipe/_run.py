"""One run: the lanes of all stages, the channels between them, and the workers that walk their programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from microbatch import Batch
from streams import AbstractStream, Context, current_stream, wait_stream

from ._carry import Place, carrier
from ._errors import Poisoned
from ._failures import Failures
from ._hooks import HeldGradients, release
from ._inline import is_inline
from ._lane import Lane
from ._link import Channel, Link
from ._loss import LossEnd
from ._ports import Ports
from ._random import RunRandom
from ._record import WatchedLink, recorder
from ._stage import Stage
from ._workers import Workers
from .schedule import Action, Schedule, Step, Walk, fill_drain, halves, named, validate
from .skip import SkipLayout
from .skip._layout import Route


class Run:
    """One mini-batch on its way through the stages and back.

    Channel j leads into stage j, and the last one out of the pipeline. The owner of the run puts values into the first
    and takes them out of the last; gradients go the other way.
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
        self._context = Context.capture()
        self._devices = [stage.device for stage in stages]
        self._streams = [current_stream(device) for device in self._devices]
        self._inline = is_inline()
        self._placement = (0,) * len(stages) if self._inline else workers.placement
        self._checkpoint_stop = checkpoint_stop
        self._end = end
        places = [Place(*each) for each in zip(self._devices, self._streams, copy_streams, strict=True)]
        self._recorder = recorder()
        if self._recorder is not None:
            self._recorder.begin(workers.placement)
        self._failures = Failures()
        link = Link if self._recorder is None else WatchedLink
        channel = partial(Channel, link=link, hopeless=self._failures.forestall)
        self._channels = _channels(places, channel)
        skips = [(route, _channel(f"of skip {route.key[1]!r}", places, *route[1:], channel)) for route in layout.routes]
        self._skips = [channel for _, channel in skips]
        self._random = RunRandom()
        for stage in stages:
            stage.begin()
        self._lanes = [
            Lane(
                stage,
                *ports,
                microbatches=microbatches,
                checkpoint_stop=checkpoint_stop,
                keep=torch.is_grad_enabled(),
                context=self._context,
                random=self._random,
                end=end,
            )
            for stage, ports in zip(stages, _ports(self._channels, skips, end), strict=True)
        ]

    def forward(self, batches: Sequence[Batch]) -> list[Batch]:
        """The outputs of all micro-batches, as leaves; those that a backward can start from require grad."""
        for i, batch in enumerate(batches):
            self._channels[0].values.put(i, batch)
        self._walk(self._halves()[0], self._context)
        self._look_for_draws()
        return [self._channels[-1].values.get(i) for i in range(self._microbatches)]

    def backward(self, gradients: Sequence[list[Tensor | None]]) -> list[list[Tensor | None]]:
        """Accumulate the gradients of all parameters; those of the inputs, by micro-batch and tensor."""
        now = [current_stream(device) for device in self._devices]
        _all_wait(self._streams, now)
        for i, each in enumerate(gradients):
            self._channels[-1].gradients.put(i, each)
        self._walk(self._halves()[1], Context.capture())
        _all_wait(now, self._streams)
        release(self._held())
        return [self._channels[0].gradients.get(i) for i in range(self._microbatches)]

    def train(self, batches: Sequence[Batch], walk: Walk) -> list[list[Tensor | None]]:
        """Forwards and backwards as ``walk`` says; the gradients of the inputs, by micro-batch and tensor."""
        for i, batch in enumerate(batches):
            self._channels[0].values.put(i, batch)
        self._walk(walk, self._context)
        self._look_for_draws()
        _all_wait([current_stream(device) for device in self._devices], self._streams)
        release(self._held(), 1.0 if self._end is None else self._end.scale)
        return [self._channels[0].gradients.get(i) for i in range(self._microbatches)]

    def _halves(self) -> tuple[Walk, Walk]:
        return _halves(self._microbatches, self._checkpoint_stop, self._placement)

    def walk(self, schedule: Schedule | str) -> Walk:
        """What each worker does under ``schedule``. ValueError if there is none of this name, or it does not fit."""
        if isinstance(schedule, str):
            return _named(schedule, self._microbatches, self._checkpoint_stop, self._placement)
        validate(schedule, self._microbatches, self._placement)
        return schedule.on(self._placement)

    def _walk(self, walk: Walk, context: Context) -> None:
        """Let every worker walk its steps; raise the earliest failure if there is any."""
        self._failures.begin(walk)
        try:
            self._run_all(walk, context)
            self._failures.raise_earliest()
        except BaseException:
            for held in self._held():
                held.give_back()
            raise

    def _run_all(self, walk: Walk, context: Context) -> None:
        works = [partial(self._do, steps, context) for steps in walk]
        if self._inline:
            works[0]()
        else:
            streams = [self._streams[self._placement.index(worker)] for worker in range(len(works))]
            self._workers.run(list(zip(streams, works, strict=True)), self._stop)

    def _held(self) -> list[HeldGradients]:
        return [lane.held for lane in self._lanes if lane.held is not None]

    def _do(self, steps: Sequence[Step], context: Context) -> None:
        """Walk the steps of one worker, until one fails, or nothing is left that comes before a failure."""
        failures = self._failures
        step = steps[0]
        try:
            with context.applied(), torch.autograd.set_multithreading_enabled(False):
                do = self._doing()
                for step in steps:
                    if failures.before(step):
                        return
                    do(self._lanes[step.stage], step.action)
        except Poisoned:
            return
        except BaseException as error:
            failures.add(step, error)
            self._poison()
            self._lanes[step.stage].annotate(error, step.action)

    def _doing(self) -> Callable[[Lane, Action], None]:
        if self._recorder is not None:
            return self._recorder.do
        return _labelled if torch.autograd.profiler._is_profiler_enabled else Lane.do

    def _look_for_draws(self) -> None:
        self._random.look()
        if self._random.unexpected:
            for lane in self._lanes:
                lane.stage.forget_draws()

    def _stop(self) -> None:
        """Make every worker come to an end soon."""
        self._failures.stop()
        self._poison()

    def _poison(self) -> None:
        for channel in (*self._channels, *self._skips):
            channel.poison()


@lru_cache(maxsize=64)
def _halves(microbatches: int, checkpoint_stop: int, placement: tuple[int, ...]) -> tuple[Walk, Walk]:
    """What the workers do before the caller gets the outputs, and after it gave the gradients."""
    forwards, backwards = halves(fill_drain(microbatches, len(placement), checkpoint_stop))
    return forwards.on(placement), backwards.on(placement)


@lru_cache(maxsize=64)
def _named(name: str, microbatches: int, checkpoint_stop: int, placement: tuple[int, ...]) -> Walk:
    return named(name, microbatches, placement, checkpoint_stop).on(placement)


def _labelled(lane: Lane, action: Action) -> None:
    with torch.profiler.record_function(f"gpipe {action}@{lane.stage.index}"):
        lane.do(action)


def _channels(places: Sequence[Place], channel: Callable[..., Channel]) -> list[Channel]:
    between = [_channel("", places, j, j + 1, channel) for j in range(len(places) - 1)]
    return [channel("at the input"), *between, channel("at the output")]


def _channel(what: str, places: Sequence[Place], a: int, b: int, channel: Callable[..., Channel]) -> Channel:
    name = f"{what} between partitions {a} and {b}".strip()
    return channel(name, carrier(places[a], places[b]), carrier(places[b], places[a]))


def _ports(
    channels: Sequence[Channel], skips: Sequence[tuple[Route, Channel]], end: LossEnd | None
) -> Iterator[tuple[Ports, Ports | LossEnd]]:
    """What arrives at each stage and what departs from it."""
    for j, (arrival, departure) in enumerate(pairwise(channels)):
        popped = [channel for route, channel in skips if route.target == j]
        stashed = [channel for route, channel in skips if route.source == j]
        is_last = j == len(channels) - 2
        yield Ports(arrival, popped), end if end is not None and is_last else Ports(departure, stashed)


def _all_wait(sources: Sequence[AbstractStream], targets: Sequence[AbstractStream]) -> None:
    for source, target in zip(sources, targets, strict=True):
        wait_stream(source, target)
