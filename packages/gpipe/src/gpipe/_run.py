"""One run: the lanes of all stages, the channels between them, and the workers that walk their programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from microbatch import Batch
from streams import AbstractStream, Context, current_stream, wait_stream

from ._carry import Place, carrier
from ._errors import Poisoned
from ._inline import is_inline
from ._lane import Lane
from ._link import Channel
from ._ports import Ports
from ._random import RunRandom
from ._stage import Stage
from ._workers import Workers, placement
from .schedule import Program, Step, fill_drain, halves, start_ticks
from .skip import SkipLayout
from .skip._layout import Route


class Half(NamedTuple):
    """What the stages do before the caller gets the outputs, or after it gave the gradients.

    Attributes:
        programs: for each stage, its actions in order.
        walk: for each worker, the steps of its stages in order.
    """

    programs: tuple[Program, ...]
    walk: tuple[tuple[Step, ...], ...]


class Failure(NamedTuple):
    """What went wrong, and at which step."""

    step: Step
    error: BaseException


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
    ) -> None:
        self._workers = workers
        self._microbatches = microbatches
        self._context = Context.capture()
        self._devices = [stage.device for stage in stages]
        self._streams = [current_stream(device) for device in self._devices]
        self._inline = is_inline()
        self._placement = (0,) * len(stages) if self._inline else placement(self._devices)
        self._halves = _plan(microbatches, len(stages), checkpoint_stop, self._placement)
        places = [Place(*each) for each in zip(self._devices, self._streams, copy_streams, strict=True)]
        self._channels = _channels(places)
        skips = [(route, _channel(f"of skip {route.key[1]!r}", places, *route[1:])) for route in layout.routes]
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
            )
            for stage, ports in zip(stages, _ports(self._channels, skips), strict=True)
        ]

    def forward(self, batches: Sequence[Batch]) -> list[Batch]:
        """The outputs of all micro-batches, as leaves; those that a backward can start from require grad."""
        for i, batch in enumerate(batches):
            self._channels[0].values.put(i, batch)
        self._walk(self._halves[0], self._context)
        self._look_for_draws()
        return [self._channels[-1].values.get(i) for i in range(self._microbatches)]

    def backward(self, gradients: Sequence[list[Tensor | None]]) -> list[list[Tensor | None]]:
        """Accumulate the gradients of all parameters; those of the inputs, by micro-batch and tensor."""
        now = [current_stream(device) for device in self._devices]
        _all_wait(self._streams, now)
        for i, each in enumerate(gradients):
            self._channels[-1].gradients.put(i, each)
        self._walk(self._halves[1], Context.capture())
        _all_wait(now, self._streams)
        return [self._channels[0].gradients.get(i) for i in range(self._microbatches)]

    def _walk(self, half: Half, context: Context) -> None:
        """Let every worker walk its steps; raise the earliest failure if there is any."""
        works = [partial(self._do, steps, context) for steps in half.walk]
        if self._inline:
            found = [works[0]()]
        else:
            streams = [self._streams[self._placement.index(worker)] for worker in range(len(works))]
            found = self._workers.run(list(zip(streams, works, strict=True)), self._poison)
        failures = [failure for failure in found if failure is not None]
        try:
            if failures:
                for lane in self._lanes:
                    lane.end()
                raise _earliest(failures, half.programs)
        finally:
            del failures, found  # the error's traceback holds this frame, which would hold the error

    def _do(self, steps: Sequence[Step], context: Context) -> Failure | None:
        """Walk the steps of one worker; what stopped it, if anything did."""
        step = steps[0]
        try:
            with context.applied(), torch.autograd.set_multithreading_enabled(False):
                for step in steps:
                    self._lanes[step.stage].do(step.action)
        except Poisoned:
            return None
        except BaseException as error:
            self._lanes[step.stage].annotate(error, step.action)
            self._poison()
            return Failure(step, error)
        return None

    def _look_for_draws(self) -> None:
        self._random.look()
        if self._random.unexpected:
            for lane in self._lanes:
                lane.stage.forget_draws()

    def _poison(self) -> None:
        for channel in (*self._channels, *self._skips):
            channel.poison()


@lru_cache(maxsize=64)
def _plan(microbatches: int, stages: int, checkpoint_stop: int, placement: tuple[int, ...]) -> tuple[Half, Half]:
    forwards, backwards = halves(fill_drain(microbatches, stages, checkpoint_stop))
    return Half(forwards, forwards.on(placement)), Half(backwards, backwards.on(placement))


def _channels(places: Sequence[Place]) -> list[Channel]:
    between = [_channel("", places, j, j + 1) for j in range(len(places) - 1)]
    return [Channel("at the input"), *between, Channel("at the output")]


def _channel(what: str, places: Sequence[Place], a: int, b: int) -> Channel:
    name = f"{what} between partitions {a} and {b}".strip()
    return Channel(name, carrier(places[a], places[b]), carrier(places[b], places[a]))


def _ports(channels: Sequence[Channel], skips: Sequence[tuple[Route, Channel]]) -> Iterator[tuple[Ports, Ports]]:
    """What arrives at each stage and what departs from it."""
    for j, (arrival, departure) in enumerate(pairwise(channels)):
        popped = [channel for route, channel in skips if route.target == j]
        stashed = [channel for route, channel in skips if route.source == j]
        yield Ports(arrival, popped), Ports(departure, stashed)


def _all_wait(sources: Sequence[AbstractStream], targets: Sequence[AbstractStream]) -> None:
    for source, target in zip(sources, targets, strict=True):
        wait_stream(source, target)


def _earliest(failures: Sequence[Failure], programs: Sequence[Program]) -> BaseException:
    ticks = start_ticks(programs, range(len(programs)))
    return min(failures, key=lambda failure: (ticks[failure.step], failure.step.stage)).error
