"""What happened in a run and when, as plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .._forks import fork_lock
from ..schedule import Kind

_reading = fork_lock()

SECONDS, TICKS = "s", "ticks"
"""Units of time. A tick is what a forward takes, in a simulation of stages of which only bytes are known."""


@dataclass(frozen=True)
class Event:
    """One action of a stage on a micro-batch.

    Attributes:
        stage, microbatch, kind: which action it was.
        device: where it ran.
        start, end: in seconds from the begin of the run.
        wait: the seconds that the worker stood still before, waiting for a link.
        bytes_moved: what crossed from another device for it.
        layers: of the stage, as text for people.
        held_bytes: the activations that the stage keeps for backward when the action ends; None if unknown.
    """

    stage: int
    microbatch: int
    kind: Kind
    device: str
    start: float
    end: float
    wait: float = 0.0
    bytes_moved: int = 0
    layers: str = ""
    held_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))  # its name will do

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.kind.letter}{self.microbatch}@{self.stage}"


class Events:
    """The actions of a run, with what can be read off them.

    Threads may :meth:`add` to it while it is being filled, and read it when they are done.

    Args:
        events: to begin with.
        workers: the worker of each stage; a stage not in there has one of its own, of the same number.
        unit: of all times. In ``"ticks"`` where no seconds are known.

    >>> timeline = Events([Event(j, 0, "forward", device="cpu", start=j, end=j + 1) for j in range(2)])
    >>> timeline.makespan, timeline.bubble
    (2, 0.5)
    """

    workers: dict[int, int]
    unit: str

    def __init__(
        self, events: Iterable[Event] = (), workers: Mapping[int, int] | None = None, unit: str = SECONDS
    ) -> None:
        self.workers = dict(workers or {})
        self.unit = unit
        self._events: tuple[Event, ...] = ()
        self._added: deque[Event | Callable[[], Event]] = deque(events)

    def add(self, event: Event | Callable[[], Event]) -> None:
        """Note an action, from any thread.

        A function is called once, when the timeline is read: a time on a GPU is known only after its work.
        """
        self._added.append(event)

    @property
    def events(self) -> tuple[Event, ...]:
        """All actions, by their start."""
        with _reading:
            if self._added:
                self._events = tuple(sorted((*self._events, *self._settled()), key=lambda e: (e.start, e.stage)))
            return self._events

    def _settled(self) -> list[Event]:
        # Nothing is taken away before all could be read: if a function raises, the next reader finds everything.
        settled = [each() if callable(each) else each for each in tuple(self._added)]
        for _ in settled:
            self._added.popleft()
        return settled

    @property
    def lanes(self) -> dict[int, tuple[Event, ...]]:
        """The actions of each worker, by their start."""
        lanes: dict[int, list[Event]] = {}
        for event in self.events:
            lanes.setdefault(self.workers.get(event.stage, event.stage), []).append(event)
        return {worker: tuple(lanes[worker]) for worker in sorted(lanes)}

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return 1 + max((event.stage for event in self.events), default=-1)

    @property
    def microbatches(self) -> int:
        """How many micro-batches there are."""
        return 1 + max((event.microbatch for event in self.events), default=-1)

    @property
    def start(self) -> float:
        """When the first action starts."""
        return min((event.start for event in self.events), default=0.0)

    @property
    def end(self) -> float:
        """When the last action ends."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def makespan(self) -> float:
        """The seconds from the first start to the last end."""
        return self.end - self.start

    @property
    def utilisation(self) -> dict[int, float]:
        """For each worker, the share of the makespan in which it does something."""
        makespan = self.makespan
        return {worker: _share(_covered(lane), makespan) for worker, lane in self.lanes.items()}

    @property
    def bubble(self) -> float:
        """The share of the workers' time between the first start and the last end in which they do nothing."""
        shares = self.utilisation.values()
        return 1 - sum(shares) / len(shares) if shares else 0.0

    def held(self, *stages: int) -> list[tuple[float, int]]:
        """The bytes of activations that these stages keep together, as (from when on, bytes); empty if unknown."""
        bytes_of: dict[int, int] = {}
        steps = []
        for event in sorted(self.events, key=lambda e: e.end):
            if event.stage in stages and event.held_bytes is not None:
                bytes_of[event.stage] = event.held_bytes
                steps.append((event.end, sum(bytes_of.values())))
        return steps

    @property
    def peak_bytes(self) -> dict[int, int] | None:
        """For each stage the most bytes of activations that it keeps at any one time; None if unknown."""
        return self._peaks({event.stage: {event.stage} for event in self.events})

    @property
    def device_peak_bytes(self) -> dict[str, int] | None:
        """The same for each device, whose stages have their peaks at different times."""
        stages: dict[str, set[int]] = {}
        for event in self.events:
            stages.setdefault(event.device, set()).add(event.stage)
        return self._peaks(stages)

    def _peaks(self, stages: Mapping[Any, Iterable[int]]) -> dict[Any, int] | None:
        held = {owner: self.held(*own) for owner, own in stages.items()}
        if not any(held.values()):
            return None
        return {owner: max((size for _, size in steps), default=0) for owner, steps in sorted(held.items())}

    def __len__(self) -> int:
        return len(self._events) + len(self._added)

    def __repr__(self) -> str:
        # Says nothing about time: it would have to wait for the device, and debuggers call this at any moment.
        return f"<{type(self).__name__} of {len(self)} actions>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.events, self.workers, self.unit)


def _covered(lane: Iterable[Event]) -> float:
    """The seconds in which at least one of the events, given by their start, is going on."""
    total, reach = 0.0, float("-inf")
    for event in lane:
        total += max(0.0, event.end - max(event.start, reach))
        reach = max(reach, event.end)
    return total


def _share(seconds: float, makespan: float) -> float:
    # A run that takes no time wastes none; and sums are rounded.
    return min(1.0, seconds / makespan) if makespan > 0 else 1.0
