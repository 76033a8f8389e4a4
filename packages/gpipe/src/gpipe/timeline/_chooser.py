"""Measure the cells of a pipe in its first steps, and choose the schedule of later steps by that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from microbatch import Batch

from .._torch import is_profiled
from ..engine._stage import Stage
from ..schedule import SCHEDULES, SPLITTING, Choice, Kind, Schedule, Seconds, choose, named, worth_splitting
from ..schedule._named import expect_schedule
from ._events import Event
from ._record import Recorder

RUNS = 3
"""How many steps are measured until what an action takes counts as known; the first one is slow for many reasons."""

Cell = tuple[int, Kind]
Situation = tuple[object, ...]


class Size(NamedTuple):
    """What a choice of the schedule depends on.

    Attributes:
        microbatches: how many there are.
        placement: the worker of each stage.
        checkpoint_stops: of each stage; micro-batches below it are checkpointed.
    """

    microbatches: int
    placement: tuple[int, ...]
    checkpoint_stops: tuple[int, ...]


class Standing(NamedTuple):
    """What there is to know of stages before a step.

    Attributes:
        training: whether they are in training mode.
        trained: the numbers of those with parameters to train.
        whole: the numbers of those whose backward has turned out to be one that cannot be split.
    """

    training: bool
    trained: tuple[int, ...]
    whole: tuple[int, ...]


def standing_of(stages: Sequence[Stage]) -> Standing:
    """That of ``stages``, of which there is at least one."""
    return Standing(
        training=stages[0].module.training,
        trained=tuple(s.index for s in stages if any(p.requires_grad for p in s.module.parameters())),
        whole=tuple(s.index for s in stages if s.runs_whole),
    )


class MeasuredCells:
    """The measured seconds of actions, by stage and kind."""

    def __init__(self) -> None:
        self._medians: defaultdict[Cell, list[float]] = defaultdict(list)

    def add(self, events: Sequence[Event]) -> None:
        """Learn from one run."""
        runs: defaultdict[Cell, list[float]] = defaultdict(list)
        for event in events:
            runs[event.stage, event.kind].append(event.seconds)
        for cell, seconds in runs.items():
            if not self.knows(cell):
                self._medians[cell].append(median(seconds))

    def knows(self, cell: Cell) -> bool:
        """Whether enough runs have been measured."""
        return len(self._medians.get(cell, ())) >= RUNS

    @property
    def seconds(self) -> Seconds:
        """What is known. Of all runs the fastest, since whatever else the machine does only adds to it."""
        return {cell: min(medians) for cell, medians in self._medians.items() if self.knows(cell)}


@dataclass(frozen=True)
class StepPlan:
    """How a step is to run.

    Attributes:
        schedule: what it runs under: a :class:`Choice` stands for its name and split.
        recorder: watches it, if there is something to be learned.
        measured: where that belongs.
    """

    schedule: Schedule | Choice
    recorder: Recorder | None = None
    measured: MeasuredCells | None = None


class Chooser:
    """Decides under which schedules the steps of a pipe run. For one thread at a time.

    ``"auto"`` leaves the schedule to :func:`gpipe.schedule.choose`, and those of :data:`gpipe.schedule.SPLITTING` leave
    which stages they split. Everything else is what it says, and is not measured.

    Attributes:
        last: the choice for the last step; None before the first.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        # By what cells may take longer in, or shorter; in another situation they are measured anew.
        self._measured: defaultdict[Situation, MeasuredCells] = defaultdict(MeasuredCells)
        # Of all steps so far, since a choice replays three schedules: too long for each step.
        self._choices: dict[tuple[str, Size, Situation, tuple[int, ...]], tuple[Choice, set[Cell]]] = {}
        self._pending: list[StepPlan] = []
        self.last: Choice | None = None

    def plan(self, schedule: Schedule | str, batches: Sequence[Batch], size: Size) -> StepPlan:
        """How a step is to run that is asked for under ``schedule``.

        Args:
            schedule: a schedule, or the name of one.
            batches: the micro-batches of the step.
            size: what a schedule is built for.

        Raises:
            TypeError: it is neither a name nor a schedule.
            ValueError: there is none of this name.
        """
        expect_schedule(schedule, (*SCHEDULES, "auto"))
        plan = self._named(schedule.lower(), batches, size) if isinstance(schedule, str) else StepPlan(schedule)
        self.last = choice_of(plan.schedule)
        return plan

    def learn(self, plan: StepPlan) -> None:
        """A step has run as planned. What there is to learn is read before the next one: a GPU may not be through."""
        if plan.recorder is not None:
            self._pending.append(plan)

    def _named(self, name: str, batches: Sequence[Batch], size: Size) -> StepPlan:
        if name not in ("auto", *SPLITTING):
            return StepPlan(Choice(name))
        self._read()
        training, trained, whole = self.standing()
        # The first stage whose input needs a gradient: for others nobody waits.
        first = 0 if any(x.requires_grad for x in batches[0]) else min(trained, default=len(size.placement)) + 1
        # Micro-batches within a factor of two count as equally large. A worker that serves several stages, or the
        # caller, has another number of threads.
        elements = sum(x.numel() for x in batches[0]).bit_length()
        situation = elements, training, trained, first, size.placement
        measured = self._measured[situation]
        key = name, size, situation, whole
        if key not in self._choices:
            may_split = tuple(j for j in trained if j >= first and j not in whole)
            self._choices[key] = _choice(name, size, measured.seconds, may_split)
        choice, cells = self._choices[key]
        # A profiler of torch labels what a run does, which a recorder would not.
        if all(map(measured.knows, cells)) or is_profiled():
            return StepPlan(choice)
        return StepPlan(choice, Recorder(memory=False), measured)

    def _read(self) -> None:
        pending, self._pending = self._pending, []
        for plan in pending:
            assert plan.recorder is not None
            assert plan.measured is not None
            plan.measured.add(plan.recorder.timeline.events)
        if pending:  # they were made with fewer measurements
            self._choices.clear()

    def standing(self) -> Standing:
        """That of all stages now."""
        return standing_of(self._stages)


def _choice(name: str, size: Size, seconds: Seconds, may_split: tuple[int, ...]) -> tuple[Choice, set[Cell]]:
    """The choice, and which cells a step then consists of."""
    choice = choose(*size, seconds, may_split) if name == "auto" else Choice(name, worth_splitting(seconds, may_split))
    schedule = named(choice.name, *size, choice.split)
    return choice, {(j, action.kind) for j, program in enumerate(schedule) for action in program}


def choice_of(schedule: Schedule | Choice) -> Choice:
    """What callers are told of it."""
    if isinstance(schedule, Choice):
        return schedule
    split = (j for j, program in enumerate(schedule) if any(kind == Kind.BACKWARD_INPUT for kind, _ in program))
    return Choice("own", tuple(split))
