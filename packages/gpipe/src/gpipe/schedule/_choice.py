"""Choose a schedule from measured times. Nothing is measured or run here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ._actions import Kind
from ._modes import Stops
from ._named import SPLITTING, lanes, looped_placement, named
from ._replay import makespan
from ._schedule import Schedule
from ._search import search
from ._v_shaped import v_placement
from ._validate import in_flight

SPLIT_SECONDS = 2e-3
"""The shortest backward that is worth splitting, in seconds.

Splitting a backward costs about 130 µs of Python per cell. On CPUs, zero bubble was no faster than 1F1B with cells
shorter than this (``docs/benchmarks/pipeline.md``).
"""

CHOICE_TOLERANCE = 0.02
"""Schedules count as equally fast if their times differ by at most this fraction, the precision of the measurement."""

Seconds = Mapping[tuple[int, Kind], float]
"""The seconds of an action by stage and kind. Actions that were not measured are absent."""

_BY_MEMORY = ("1f1b", "zero_bubble", "fill_drain")
"""The candidates of :func:`choose`, under which stage j has at most n − j, n, and m micro-batches in flight."""


@dataclass(frozen=True)
class Choice:
    """The schedule of a step, and the expected times that it was chosen from.

    Attributes:
        name: the name of the schedule; ``"own"`` for a :class:`Schedule` that the caller passed.
        split: the stages whose backward is split.
        seconds: the expected seconds of a step under each schedule that was compared; empty if none was.
        schedule: the schedule that ``"search"`` has found; None for a named one.
    """

    name: str
    split: tuple[int, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    schedule: Schedule | None = field(default=None, repr=False)

    def __str__(self) -> str:
        split = f", stages {', '.join(map(str, self.split))} split" if self.split else ""
        expected = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        return self.name + split + (f" (expected: {expected})" if expected else "")


def worth_splitting(seconds: Seconds, stages: Collection[int]) -> tuple[int, ...]:
    """Select the stages whose backward takes at least :data:`SPLIT_SECONDS`, or was not measured.

    Args:
        seconds: the measured times of actions.
        stages: the indices of the stages to select from.

    Returns:
        The selected indices, in ascending order.

    >>> worth_splitting({(0, Kind.BACKWARD): 1e-3, (1, Kind.BACKWARD): 3e-3}, range(3))
    (1, 2)
    """
    return tuple([j for j in sorted(stages) if _backward(seconds, j, SPLIT_SECONDS) >= SPLIT_SECONDS])


def choose(
    microbatches: int, placement: Sequence[int], checkpoint_stop: Stops, seconds: Seconds, may_split: Collection[int]
) -> Choice:
    """Choose the fastest of 1F1B, zero bubble and fill-drain; on a tie, the one with the fewest in flight.

    :func:`gpipe.schedule.replay` predicts the times, without transfers. If a part of a backward was not measured, half
    of the backward's time is assumed, and for a recomputation the forward's time.

    Args:
        microbatches: the number of micro-batches.
        placement: the worker of each stage.
        checkpoint_stop: the first micro-batch that is not checkpointed, as one number or one per stage.
        seconds: the measured times of actions. Unless they include the forward and backward of every stage, the choice
            is 1F1B.
        may_split: the stages whose backward may be split. Backwards that are too short stay unsplit.

    Returns:
        The chosen schedule, with the expected time of a step under each candidate.

    Raises:
        ValueError: ``checkpoint_stop`` has the wrong length.

    >>> seconds = {(j, kind): 0.01 for j in range(2) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    >>> print(choose(4, (0, 1), 0, seconds, may_split=[0, 1]))
    zero_bubble, stages 0, 1 split (expected: 1f1b 100 ms, zero_bubble 90 ms, fill_drain 100 ms)
    """
    if not all((j, kind) in seconds for j in range(len(placement)) for kind in (Kind.FORWARD, Kind.BACKWARD)):
        return Choice("1f1b")
    split, of_stages = worth_splitting(seconds, may_split), [_of_stage(seconds, j) for j in range(len(placement))]
    built = {name: lanes(name, microbatches, placement, checkpoint_stop, split) for name in _BY_MEMORY}
    expected = {name: makespan(own, microbatches, of_stages, [0.0] * len(placement)) for name, own in built.items()}
    # _BY_MEMORY is sorted by memory, so the first candidate within the bound needs the least.
    bound = min(expected.values()) * (1 + CHOICE_TOLERANCE)
    name = next(name for name in _BY_MEMORY if expected[name] <= bound)
    return Choice(name, split if name == "zero_bubble" else (), expected)


def choose_by_search(
    microbatches: int, placement: Sequence[int], checkpoint_stop: Stops, seconds: Seconds, may_split: Collection[int]
) -> Choice:
    """Choose the schedule that :func:`gpipe.schedule.search` finds for measured times, without transfers.

    No worker holds more micro-batches in flight, counted once per stage, than the fullest one under the named schedule
    of the placement: ZB-V, interleaved zero bubble, or zero bubble.

    Args:
        microbatches, placement, checkpoint_stop, may_split: as for :func:`choose`.
        seconds: the measured times of actions. Until they include the forward of every stage, and the backward or both
            of its parts, the choice is the named schedule, with the backwards of ``may_split`` split.

    Returns:
        The chosen schedule, with the expected time of a step under it and under the named one.
    """
    name, n = _choose_name(placement), len(placement)
    parts = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    known = {j for j in range(n) if (j, Kind.BACKWARD) in seconds or all((j, kind) in seconds for kind in parts)}
    if len(known) < n or any((j, Kind.FORWARD) not in seconds for j in range(n)):
        return Choice(name, tuple(sorted(may_split)) if name in SPLITTING else ())
    split, of_stages = worth_splitting(seconds, may_split), [_of_stage(seconds, j) for j in range(n)]
    usual = named(name, microbatches, placement, checkpoint_stop, split)
    most = max(in_flight(tuple(step.action for step in steps)) for steps in usual.on(placement))
    found = search(
        microbatches,
        placement,
        of_stages,
        boundary_bytes=[1] * n,  # a checkpointed micro-batch is in flight too
        memory=most,
        checkpoint_stop=checkpoint_stop,
        split=split,
    )
    step_lists = {name: usual.on(placement), "search": found.on(placement)}
    expected = {
        each: makespan(worker_steps, microbatches, of_stages, [0.0] * n) for each, worker_steps in step_lists.items()
    }
    return Choice("search", split_in(found), expected, found)


def split_in(schedule: Schedule) -> tuple[int, ...]:
    """Return the stages whose backward is split, in some micro-batches at least."""
    return tuple(j for j, program in enumerate(schedule) if any(kind == Kind.BACKWARD_INPUT for kind, _ in program))


def _choose_name(placement: Sequence[int]) -> str:
    """Return the name of the zero bubble schedule for a placement; 1F1B on one worker, where nobody waits."""
    n, workers = len(placement), len(set(placement))
    if workers == 1:
        return "1f1b"
    if n == 2 * workers and [*placement] == v_placement(n):
        return "zbv"
    if n % workers == 0 and n > workers and [*placement] == looped_placement(n, workers):
        return "interleaved_zero_bubble"
    return "zero_bubble"


def _of_stage(seconds: Seconds, stage: int) -> dict[Kind, float]:
    """Return the durations of a stage by kind, with a guess for kinds that were not measured."""
    forward, backward = seconds[stage, Kind.FORWARD], _backward(seconds, stage, 0.0)
    guesses = dict.fromkeys(Kind, backward / 2) | {Kind.RECOMPUTE: forward, Kind.BACKWARD: backward}
    return {kind: seconds.get((stage, kind), guesses[kind]) for kind in Kind}


def _backward(seconds: Seconds, stage: int, unknown: float) -> float:
    if (stage, Kind.BACKWARD) in seconds:
        return seconds[stage, Kind.BACKWARD]
    parts = [seconds.get((stage, kind)) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
    return sum(part for part in parts if part is not None) if None not in parts else unknown
