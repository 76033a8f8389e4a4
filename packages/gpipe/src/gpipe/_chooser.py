"""Time the first steps of a pipe, and choose the schedule of later steps from these measurements."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from microbatch import Batch

from ._torch import is_profiled
from .engine._stage import Stage
from .engine._worker_steps import Size
from .schedule import SCHEDULES, SPLITTING, Choice, Kind, Schedule, choose, worth_splitting
from .schedule._choice import choose_by_search, split_in
from .schedule._named import expect_schedule

if TYPE_CHECKING:
    from .timeline._record import Recorder

RUNS = 3
"""The number of steps to measure before the durations of actions count as known. The first step is always slow."""

MEASURED = {"auto": choose, "search": choose_by_search}
"""Functions that choose a schedule from measured times, by the name that a caller passes to ``step``."""

Measured = defaultdict[tuple[int, Kind], list[float]]
"""The median duration, in seconds, of each recorded step, by stage and kind of action."""


class Chooser:
    """Chooses the schedules of a pipe's steps. Not thread-safe.

    For ``"auto"``, :func:`gpipe.schedule.choose` chooses the schedule, and for ``"search"``, it is searched. For
    :data:`gpipe.schedule.SPLITTING` schedules, only the stages to split are chosen. Steps under other schedules are not
    measured.

    Attributes:
        last: the choice for the last step, or None.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        # Keyed by everything that changes the durations of cells: in a new situation they are measured again.
        self._measured: defaultdict[object, Measured] = defaultdict(lambda: defaultdict(list))
        self._recorded = Counter[object]()
        # Cached, because a choice replays three schedules or searches one, which takes too long for every step.
        self._choices: dict[object, Choice] = {}
        self._planned: tuple[Recorder, Measured, object] | None = None
        self._unread: tuple[Recorder, Measured, object] | None = None
        self.last: Choice | None = None

    def plan(
        self, schedule: Schedule | str, batches: Sequence[Batch], size: Size
    ) -> tuple[Schedule | Choice, Recorder | None]:
        """Return the choice for a step under the requested ``schedule``, and a recorder if the step is to be measured.

        A schedule that the caller passes, or that was searched, is returned itself.

        Args:
            schedule: a schedule or its name, in any case.
            batches: the micro-batches of the step.
            size: the number of micro-batches, and the rest that determines the order of actions.

        Raises:
            TypeError, ValueError: ``schedule`` is neither a schedule nor the name of one.
        """
        expect_schedule(schedule, (*SCHEDULES, *MEASURED))
        self._planned = None
        if isinstance(schedule, Schedule):
            self.last = build_own_choice(schedule)
            return schedule, None
        name = schedule.lower()
        self.last = self._decide(name, batches, size) if name in (*MEASURED, *SPLITTING) else Choice(name)
        return self.last.schedule or self.last, self._planned and self._planned[0]

    def learn(self) -> None:
        """Note that the planned step has run. Its times are read later, because a GPU may not have finished yet."""
        self._unread = self._unread if self._planned is None else self._planned

    def _decide(self, name: str, batches: Sequence[Batch], size: Size) -> Choice:
        self._read()
        trained = [s.index for s in self._stages if any(p.requires_grad for p in s.module.parameters())]
        # The first stage whose input needs a gradient. No stage waits for the input gradients of earlier ones.
        first = 0 if any(x.requires_grad for x in batches[0]) else min(trained, default=len(size.placement)) + 1
        may_split = tuple(s.index for s in self._stages if s.index in trained and s.index >= first and not s.runs_whole)
        # Micro-batches within a factor of two count as equally large. The placement is part of the key because a worker
        # that serves several stages, or the caller's thread, has a different number of intra-op threads.
        elements = sum(x.numel() for x in batches[0]).bit_length()
        situation = elements, self._stages[0].module.training, tuple(trained), first, size.placement
        measured = self._measured[situation]
        key = name, size, situation, may_split
        if key not in self._choices:
            # The fastest run counts, because other load on the machine only adds time.
            seconds = {cell: min(medians) for cell, medians in measured.items() if len(medians) >= RUNS}
            if name in MEASURED:
                self._choices[key] = MEASURED[name](*size.order, seconds, may_split)
            else:
                self._choices[key] = Choice(name, worth_splitting(seconds, may_split))
        choice = self._choices[key]
        done = choice.name, choice.split, size.checkpoint_stops, size.offloading, situation
        # Steps under a searched schedule are not measured: with new times, it would be searched again after each.
        # Under torch's profiler, runs label their actions, which a recorder would replace.
        if self._recorded[done] < RUNS and choice.schedule is None and not is_profiled():
            from .timeline._record import Recorder  # imported late, because most schedules need no measurements

            self._planned = Recorder(), measured, done
        return choice

    def _read(self) -> None:
        if self._unread is None:
            return
        from statistics import median  # imported late: it takes a tenth of this package's import time

        (recorder, measured, done), self._unread = self._unread, None
        # The median over micro-batches, because the first may wait for memory or for kernels to be selected.
        run: Measured = defaultdict(list)
        for event in recorder.timeline.events:
            run[event.stage, event.kind].append(event.seconds)
        for cell, seconds in run.items():
            measured[cell].append(median(seconds))
        self._recorded[done] += bool(run)  # the recorder is empty if the caller records the step
        self._choices.clear()  # they are based on fewer measurements


def build_own_choice(schedule: Schedule) -> Choice:
    return Choice("own", split_in(schedule))
