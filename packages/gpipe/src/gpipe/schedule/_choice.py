"""Choose the schedule of a pipe by measured times. Nothing is measured or run here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ._actions import Kind
from ._modes import Stops
from ._named import lanes
from ._replay import makespan

SPLIT_SECONDS = 2e-3
"""Seconds: a shorter backward is not worth splitting.

Splitting a backward costs some 130 µs of Python for each cell. On CPUs, zero bubble was no faster than 1F1B where a
cell takes less than this (``docs/benchmarks/pipeline.md``).
"""

TIE = 0.02
"""Schedules whose times differ by less than this share count as equally fast. Times are not known more precisely."""

Seconds = Mapping[tuple[int, Kind], float]
"""Seconds of an action, by stage and kind; without those that were not measured."""

_BY_MEMORY = ("1f1b", "zero_bubble", "fill_drain")
"""The schedules between which :func:`choose` chooses: a stage holds at most n − j, n, and m micro-batches."""


@dataclass(frozen=True)
class Choice:
    """The schedule of a step, and the figures by which it was chosen.

    Attributes:
        name: the name of the schedule; ``"own"`` for a :class:`Schedule` that the caller gave.
        split: the stages whose backward is split.
        seconds: the expected time of a step under each schedule that was compared; empty if none was.
    """

    name: str
    split: tuple[int, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        split = f", stages {', '.join(map(str, self.split))} split" if self.split else ""
        expected = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        return self.name + split + (f" (expected: {expected})" if expected else "")


def worth_splitting(seconds: Seconds, stages: Collection[int]) -> tuple[int, ...]:
    """Those of ``stages`` whose backward is known to take :data:`SPLIT_SECONDS` or more, or is not known.

    Args:
        seconds: the measured times of actions.
        stages: the numbers of stages.

    Returns:
        Their numbers, in order.

    >>> worth_splitting({(0, Kind.BACKWARD): 1e-3, (1, Kind.BACKWARD): 3e-3}, range(3))
    (1, 2)
    """
    return tuple([j for j in sorted(stages) if _backward(seconds, j, SPLIT_SECONDS) >= SPLIT_SECONDS])


def choose(
    microbatches: int, placement: Sequence[int], checkpoint_stop: Stops, seconds: Seconds, may_split: Collection[int]
) -> Choice:
    """The fastest of 1F1B, zero bubble and fill-drain; of equally fast ones, that which holds the fewest micro-batches.

    Times are those of :func:`gpipe.schedule.replay`, without transfers. A part of a backward that was not measured
    counts as half of it, and a recomputation as a forward.

    Args:
        microbatches: the number of micro-batches.
        placement: the worker of each stage.
        checkpoint_stop: micro-batches below it are checkpointed; a number, or one for each stage.
        seconds: the measured times of actions. Unless they include the forward and backward of every stage, the choice
            is 1F1B.
        may_split: the stages whose backward may be split.

    Returns:
        The name, the stages whose backward is split, and the expected time under each schedule.

    >>> seconds = {(j, kind): 0.01 for j in range(2) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    >>> print(choose(4, (0, 1), 0, seconds, may_split=[0, 1]))
    zero_bubble, stages 0, 1 split (expected: 1f1b 100 ms, zero_bubble 90 ms, fill_drain 100 ms)
    """
    if not all((j, kind) in seconds for j in range(len(placement)) for kind in (Kind.FORWARD, Kind.BACKWARD)):
        return Choice("1f1b")
    split, of_stages = worth_splitting(seconds, may_split), [_of_stage(seconds, j) for j in range(len(placement))]
    built = {name: lanes(name, microbatches, placement, checkpoint_stop, split) for name in _BY_MEMORY}
    expected = {name: makespan(own, microbatches, of_stages, [0.0] * len(placement)) for name, own in built.items()}
    # They are listed by what they hold: of those that are about as fast, the first needs the least memory.
    bound = min(expected.values()) * (1 + TIE)
    name = next(name for name in _BY_MEMORY if expected[name] <= bound)
    return Choice(name, split if name == "zero_bubble" else (), expected)


def _of_stage(seconds: Seconds, stage: int) -> dict[Kind, float]:
    forward, part = seconds[stage, Kind.FORWARD], seconds[stage, Kind.BACKWARD] / 2
    return {kind: seconds.get((stage, kind), forward if kind == Kind.RECOMPUTE else part) for kind in Kind}


def _backward(seconds: Seconds, stage: int, unknown: float) -> float:
    if (stage, Kind.BACKWARD) in seconds:
        return seconds[stage, Kind.BACKWARD]
    parts = [seconds.get((stage, kind)) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
    return sum(part for part in parts if part is not None) if None not in parts else unknown
