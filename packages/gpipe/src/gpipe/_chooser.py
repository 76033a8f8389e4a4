"""Measure the cells of a pipe in its first steps, and choose the schedule of later steps by that."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from microbatch import Batch

from ._torch import is_profiled
from .engine._stage import Stage
from .engine._walks import Size
from .schedule import SCHEDULES, SPLITTING, Choice, Kind, Schedule, choose, worth_splitting
from .schedule._named import expect_schedule

if TYPE_CHECKING:
    from .timeline._record import Recorder

RUNS = 3
"""How many steps are measured until what an action takes counts as known; the first one is slow for many reasons."""

Measured = defaultdict[tuple[int, Kind], list[float]]
"""By stage and kind of action, the median seconds of each recorded step."""


class Chooser:
    """Decides under which schedules the steps of a pipe run. For one thread at a time.

    ``"auto"`` leaves the schedule to :func:`gpipe.schedule.choose`, and those of :data:`gpipe.schedule.SPLITTING` leave
    which stages they split. Nothing else is measured. ``last`` is the choice for the last step, or None.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        # By what cells may take longer in, or shorter; in another situation they are measured anew.
        self._measured: defaultdict[object, Measured] = defaultdict(lambda: defaultdict(list))
        self._recorded = Counter[object]()
        # Of all steps so far, since a choice replays three schedules: too long for each step.
        self._choices: dict[object, Choice] = {}
        self._planned: tuple[Recorder, Measured, object] | None = None
        self._unread: tuple[Recorder, Measured, object] | None = None
        self.last: Choice | None = None

    def plan(
        self, schedule: Schedule | str, batches: Sequence[Batch], size: Size
    ) -> tuple[Schedule | Choice, Recorder | None]:
        """The choice for a step that is asked for under ``schedule``, and what records it if it is to be measured."""
        expect_schedule(schedule, (*SCHEDULES, "auto"))
        self._planned = None
        if isinstance(schedule, Schedule):
            self.last = choice_of(schedule)
            return schedule, None
        name = schedule.lower()
        self.last = self._decided(name, batches, size) if name in ("auto", *SPLITTING) else Choice(name)
        return self.last, self._planned and self._planned[0]

    def learn(self) -> None:
        """The planned step has run. Its times are read before the next one, as a GPU may not be done yet."""
        self._unread = self._unread if self._planned is None else self._planned

    def _decided(self, name: str, batches: Sequence[Batch], size: Size) -> Choice:
        self._read()
        trained = [s.index for s in self._stages if any(p.requires_grad for p in s.module.parameters())]
        # The first stage whose input needs a gradient: for others nobody waits.
        first = 0 if any(x.requires_grad for x in batches[0]) else min(trained, default=len(size.placement)) + 1
        may_split = tuple(s.index for s in self._stages if s.index in trained and s.index >= first and not s.runs_whole)
        # Micro-batches within a factor of two count as equally large. A worker that serves several stages, or the
        # caller, has another number of threads.
        elements = sum(x.numel() for x in batches[0]).bit_length()
        situation = elements, self._stages[0].module.training, tuple(trained), first, size.placement
        measured = self._measured[situation]
        key = name, size, situation, may_split
        if key not in self._choices:
            # The fastest run counts, since whatever else the machine does only adds to it.
            seconds = {cell: min(medians) for cell, medians in measured.items() if len(medians) >= RUNS}
            split = worth_splitting(seconds, may_split)
            self._choices[key] = choose(*size, seconds, may_split) if name == "auto" else Choice(name, split)
        choice = self._choices[key]
        done = choice.name, choice.split, size.checkpoint_stops, situation
        # A profiler of torch labels what a run does, which a recorder would not.
        if self._recorded[done] < RUNS and not is_profiled():
            from .timeline._record import Recorder  # most pipes run under a schedule that needs no measurements

            self._planned = Recorder(), measured, done
        return choice

    def _read(self) -> None:
        if self._unread is None:
            return
        from statistics import median  # imported late: it takes a tenth of the time of this package

        (recorder, measured, done), self._unread = self._unread, None
        # The median of the micro-batches of a run: the first of them may wait for memory, or for kernels to be chosen.
        run: Measured = defaultdict(list)
        for event in recorder.timeline.events:
            run[event.stage, event.kind].append(event.seconds)
        for cell, seconds in run.items():
            measured[cell].append(median(seconds))
        self._recorded[done] += bool(run)  # nothing is seen where the caller records
        self._choices.clear()  # they were made with fewer measurements


def choice_of(schedule: Schedule) -> Choice:
    split = (j for j, program in enumerate(schedule) if any(kind == Kind.BACKWARD_INPUT for kind, _ in program))
    return Choice("own", tuple(split))
