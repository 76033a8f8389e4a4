"""Record runs: the actions of each worker, their times, waits and transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profiler import AllocationTracker
from streams import AbstractStream, current_stream, has_streams, new_stream, record_event

from ..engine._settings import with_settings
from ..engine._stage import Stage
from ..schedule import Action
from ..values._leaves import Activation
from ._events import Event
from ._timeline import Timeline


@contextmanager
def record(*, memory: bool = False) -> Iterator[Timeline]:
    """Record every run of a pipe that starts inside this context in one timeline.

    If contexts are nested, only the innermost records. :meth:`gpipe.Plan.verify` uses such a context internally.

    Args:
        memory: also count the bytes of activations that each stage holds. This intercepts every operation, which
            distorts the recorded times.

    Returns:
        A context manager that returns the timeline. Reading the timeline waits for the recorded work on GPUs.

    >>> from torch import nn
    >>> from gpipe import GPipe
    >>> pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu", "cpu"], chunks=2)
    >>> with record() as timeline:
    ...     pipe(torch.zeros(4, 2)).sum().backward()
    >>> sorted(map(str, timeline.events))
    ['B0@0', 'B0@1', 'B1@0', 'B1@1', 'F0@0', 'F0@1', 'F1@0', 'F1@1', 'R0@0', 'R0@1']
    """
    recorder = Recorder(lambda stages: {j: AllocationTracker() for j in range(stages)} if memory else {})
    with with_settings(observer=recorder):
        yield recorder.timeline


class Recorder:
    """Collects the actions of several runs in one timeline.

    Args:
        trackers: returns the trackers that count the bytes of each stage in a run, given the number of stages. By
            default bytes are not counted.
    """

    def __init__(self, trackers: Callable[[int], dict[int, AllocationTracker]] = lambda stages: {}) -> None:
        self.timeline = Timeline()
        self._clock = Clock()
        self._trackers = trackers

    def begin(self, placement: Sequence[int]) -> RunRecorder:
        self.timeline.workers.update(enumerate(placement))
        return RunRecorder(self.timeline, self._clock, self._trackers(len(placement)))


class RunRecorder:
    """Records the actions of one run."""

    def __init__(self, timeline: Timeline, clock: Clock, trackers: dict[int, AllocationTracker]) -> None:
        self._looking = threading.local()  # has a ``look`` while its thread runs an action
        self._timeline = timeline
        self._clock = clock
        self._own: list[Callable[[], Event] | Event] = []
        self._trackers = trackers

    @contextmanager
    def observing(self, stage: Stage, action: Action) -> Iterator[None]:
        tracker = self._trackers.get(stage.index)
        self._looking.look = look = Look(partial(self._clock.now, stage.device))
        with nullcontext() if tracker is None else tracker.pushed():
            yield
        end = self._clock.now(stage.device)
        held = None
        if tracker is not None:  # parameter gradients outlive the run, so they are not activations
            held = tracker.alive(without=[p.grad for p in stage.module.parameters() if p.grad is not None])

        def event() -> Event:
            place = stage.index, action.microbatch, action.kind, str(stage.device)
            wait = sum((b() - a() for a, b in look.waits), start=0.0)
            return Event(*place, look.start(), end(), wait, look.bytes_moved, stage.layers, held)

        self._own.append(event if stage.on_accelerator else event())
        self._timeline.add(self._own[-1])

    def got(self, payload: Activation | list[Tensor | None], *, moved: bool) -> None:
        self._looking.look.got(payload, moved=moved)

    def export_events(self, since: float) -> list[list[Any]]:
        begin = self._clock.at(since)
        events = [each if isinstance(each, Event) else each() for each in self._own]
        return [[*astuple(replace(each, start=each.start - begin, end=each.end - begin))] for each in events]

    def import_events(self, events: list[list[Any]], since: float) -> None:
        begin = self._clock.at(since)
        for event in (Event(*each) for each in events):
            self._timeline.add(replace(event, start=event.start + begin, end=event.end + begin))


Instant = Callable[[], float]
"""A function that returns a time in seconds; on a GPU it first waits until the time is known."""


class Look:
    """The partial record of one action."""

    def __init__(self, now: Callable[[], Instant]) -> None:
        self._now = now
        self.start = now()
        self.waits: list[tuple[Instant, Instant]] = []
        self.bytes_moved = 0

    def got(self, payload: Activation | list[Tensor | None], *, moved: bool) -> None:
        """Record the arrival of an input; the time until now counts as waiting."""
        before, self.start = self.start, self._now()
        # On a GPU this is the time from the end of its previous work to the end of the copy.
        self.waits.append((before, self.start))
        if moved:
            tensors = payload.tensors if isinstance(payload, Activation) else payload
            self.bytes_moved += sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Clock:
    """A clock of the seconds since its creation, on the CPU and on GPUs."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._bases: dict[torch.device, tuple[torch.Event, float]] = {}

    def at(self, moment: float) -> float:
        return moment - self._begin

    def now(self, device: torch.device) -> Instant:
        """Return the present time; on a GPU, the time when the current stream of ``device`` ends its queued work."""
        if not has_streams(device):
            moment = self.at(time.perf_counter())
            return lambda: moment
        base, moment = self._base(device)
        event = _event(current_stream(device))

        def seconds() -> float:
            event.synchronize()
            return moment + float(base.elapsed_time(event)) / 1e3

        return seconds

    def _base(self, device: torch.device) -> tuple[torch.Event, float]:
        if device not in self._bases:
            # Use an empty stream, because synchronizing the current one would drain its queue and idle the device.
            base = _event(new_stream(device))
            base.synchronize()
            self._bases.setdefault(device, (base, self.at(time.perf_counter())))
        return self._bases[device]


def _event(stream: AbstractStream) -> torch.Event:
    event = record_event(stream, timed=True)
    assert event is not None
    return event
