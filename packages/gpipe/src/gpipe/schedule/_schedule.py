""":class:`Schedule`: the program of every stage, and its text format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, zip_longest

from ._actions import LOSS_OF_ALL, Action, Kind, Program, Step, WorkerSteps, deadlock, dependencies_of
from ._loads import ROOM, expect_loaded, with_loads
from ._modes import Stops, stop_of_each
from ._offloads import CELLS, expect_prefetched, with_offloads


class Schedule(tuple[Program, ...]):
    """The program of each stage: a tuple of tuples of :class:`Action`.

    If several stages share a worker, ``worker_steps`` is the order of their steps; without it, a worker runs the step
    that can start first. It is None if every stage has its own worker. Schedules are equal if their programs and their
    worker steps are.

    Raises ValueError if ``worker_steps`` and ``programs`` have different steps, or a stage has steps on two workers.

    ``str()`` returns one line per worker; :meth:`parse` is its inverse.

    >>> from gpipe.schedule import one_forward_one_backward
    >>> print(one_forward_one_backward(3, 2))
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2
    """

    worker_steps: WorkerSteps | None

    def __new__(cls, programs: Iterable[Iterable[Action]], worker_steps: WorkerSteps | None = None) -> Schedule:
        schedule = super().__new__(cls, tuple(map(tuple, programs)))
        schedule.worker_steps = None if worker_steps is None else _check_worker_steps(worker_steps, schedule)
        return schedule

    def __eq__(self, other: object) -> bool:
        # The programs do not determine how a worker interleaves the steps of its stages.
        return (
            isinstance(other, tuple)
            and tuple.__eq__(self, other)
            and self.worker_steps == getattr(other, "worker_steps", None)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # A schedule without worker steps equals the tuple of its programs.
        own = tuple.__hash__(self)
        return own if self.worker_steps is None else hash((own, self.worker_steps))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule from text with one line per worker, and actions such as ``F0`` or ``B3@2``.

        An action without ``@stage`` on line j belongs to stage j, counted from 0 without empty lines. Dots, and text
        after ``#``, are ignored.

        Args:
            text: the text of a schedule.

        Returns:
            The schedule.

        Raises:
            ValueError: a word cannot be parsed, and the message names it and its line; or the steps of a stage are on
                two lines.

        >>> from gpipe.schedule import fill_drain
        >>> Schedule.parse("F0 F1 . . B1 B0  # all forwards first") == fill_drain(2, 1)
        True
        """
        lines = [(number, line.split("#")[0].split()) for number, line in enumerate(text.splitlines(), start=1)]
        worker_steps = tuple(
            tuple(_read(word, worker, number) for word in words if word.strip("."))
            for worker, (number, words) in enumerate([line for line in lines if line[1]])
        )
        stages = 1 + max((step.stage for steps in worker_steps for step in steps), default=-1)
        return cls(build_programs(worker_steps, stages), worker_steps)

    def on(self, placement: Sequence[int]) -> WorkerSteps:
        """Return the steps of each worker if stage j runs on worker ``placement[j]``.

        ``worker_steps`` is returned if it is for this placement. Otherwise a worker runs the step that can start first.

        Args:
            placement: the worker of each stage, counted from 0.

        Returns:
            The steps of each worker, in order.

        Raises:
            ValueError: the programs wait for each other forever.
        """
        if self.worker_steps is None:
            return merge(self, placement)
        # A list of worker steps has no lines of workers without stages.
        lines = {worker: line for line, worker in enumerate(sorted(set(placement)))}
        if _places(self.worker_steps) != {j: lines[worker] for j, worker in enumerate(placement)}:
            return merge(self, placement)
        return tuple(self.worker_steps[lines[worker]] if worker in lines else () for worker in range(max(lines) + 1))

    def recomputing(self, checkpoint_stop: Stops) -> Schedule:
        """Add a recomputation just before each backward of a micro-batch below ``checkpoint_stop``.

        Recomputations that the schedule already contains stay where they are.

        Args:
            checkpoint_stop: the first micro-batch that is not checkpointed, as one number or one per stage.

        Returns:
            A new schedule.

        Raises:
            ValueError: ``checkpoint_stop`` has the wrong length.

        >>> print(Schedule.parse("F0 F1 B0 B1").recomputing(1))
        F0 F1 R0 B0 B1
        """
        stops = stop_of_each(checkpoint_stop, len(self))
        present = {step for line in self._lines for step in line}
        lines = tuple(
            tuple(each for step in line for each in _recomputing(step, present, stops[step.stage]))
            for line in self._lines
        )
        return Schedule(build_programs(lines, len(self)), None if self.worker_steps is None else lines)

    def loading(self, placement: Sequence[int], offloaded: Collection[int] | None = None, room: int = ROOM) -> Schedule:
        """Add the loads and unloads of stages whose parameters are on the host.

        Args:
            placement: the worker of each stage, counted from 0.
            offloaded: the indices of these stages, by default all.
            room: the number of stages whose parameters a worker holds at once, at least 1.

        Returns:
            A new schedule. If this one contains loads or unloads, its steps remain as they are.

        Raises:
            ValueError: the programs wait for each other forever, or a stage computes while it is not loaded.

        >>> from gpipe.schedule import named
        >>> print(named("looped_bfs", 1, [0, 0, 0]).loading([0, 0, 0]))
        L0@0 L0@1 F0@0 U0@0 L0@2 F0@1 F0@2 B0@2 U0@2 L1@0 B0@1 U0@1 B0@0 U1@0
        """
        stages = range(len(self)) if offloaded is None else offloaded
        worker_steps = with_loads(self.on(placement), stages, room)
        expect_loaded(worker_steps, stages)
        return Schedule(build_programs(worker_steps, len(self)), worker_steps)

    def offloading(
        self, placement: Sequence[int], stages: Collection[int] | None = None, room: int = CELLS
    ) -> Schedule:
        """Add the actions that move the saved tensors of cells to the host, and back before their backwards.

        Add loads first, if the schedule has some: they are not moved.

        Args:
            placement: the worker of each stage, counted from 0.
            stages: the indices of the stages whose saved tensors move, by default all.
            room: the number of cells whose saved tensors a worker has on its device, at least 1: the one that computes,
                and the next ones, which arrive meanwhile. One more may be leaving.

        Returns:
            A new schedule. If this one contains such actions, its steps remain as they are.

        Raises:
            ValueError: the programs wait for each other forever, or saved tensors are on the host in a backward.

        >>> from gpipe.schedule import fill_drain
        >>> print(fill_drain(4, 1).offloading([0]))
        F0 O0 F1 O1 F2 O2 F3 P2 B3 P1 B2 P0 B1 B0
        """
        own = range(len(self)) if stages is None else stages
        worker_steps = with_offloads(self.on(placement), own, room)
        expect_prefetched(worker_steps, own)
        return Schedule(build_programs(worker_steps, len(self)), worker_steps)

    @property
    def has_loss(self) -> bool:
        """True if the loss of the full mini-batch is one of the actions."""
        return any(LOSS_OF_ALL in program for program in self)

    def with_loss(self) -> Schedule:
        """Add the loss of the full mini-batch after the last forward of the last stage.

        Returns:
            A new schedule, or this one if it contains the loss.

        Raises:
            ValueError: the last stage starts a backward before its last forward, so the backward cannot use this loss.

        >>> print(Schedule.parse("F0 F1 B1 B0").with_loss())
        F0 F1 C B1 B0
        """
        if self.has_loss or not len(self):
            return self
        kinds = [kind for kind, _ in self[-1]]
        end = max((k for k, kind in enumerate(kinds, start=1) if kind == Kind.FORWARD), default=0)
        if any(kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) for kind in kinds[:end]):
            early = next(action for action in self[-1] if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT))
            raise ValueError(
                f"the last stage does {early} before its last forward, {self[-1][end - 1]}, but the loss of the full "
                "mini-batch needs all forwards"
            )
        last = len(self) - 1
        forwards = {Step(last, action) for action in self[last][:end] if action.kind == Kind.FORWARD}
        lines = []
        for line in self._lines:
            place = max((k for k, step in enumerate(line, start=1) if step in forwards), default=0)
            lines.append((*line[:place], Step(last, LOSS_OF_ALL), *line[place:]) if place else line)
        return Schedule(build_programs(lines, len(self)), None if self.worker_steps is None else tuple(lines))

    @property
    def _lines(self) -> WorkerSteps:
        return self.worker_steps or tuple(
            tuple(Step(j, action) for action in program) for j, program in enumerate(self)
        )

    def __str__(self) -> str:
        worker_steps = self._lines
        alone = all(step.stage == number for number, steps in enumerate(worker_steps) for step in steps)
        return "\n".join(" ".join(str(step.action if alone else step) for step in steps) for steps in worker_steps)


_WORD = re.compile(r"(?:([FRBIWLUOP])(\d+)|(C))(?:@(\d+))?")


def _read(word: str, worker: int, line: int) -> Step:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(
            f"cannot read {word!r} in line {line} of the schedule; an action is one of the letters F R B I W L U O P, "
            "a number, and perhaps @stage, as in F0 or B3@2, or C for the loss of the full mini-batch"
        )
    letter, microbatch, loss, stage = match.groups()
    kind = next(kind for kind in Kind if kind.letter == (letter or loss))
    return Step(worker if stage is None else int(stage), Action(kind, int(microbatch or 0)))


def _recomputing(step: Step, present: set[Step], stop: int) -> Iterator[Step]:
    stage, (kind, i) = step
    needed = Step(stage, Action(Kind.RECOMPUTE, i))
    if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and i < stop and needed not in present:
        yield needed
    yield step


def _check_worker_steps(worker_steps: WorkerSteps, programs: Sequence[Program]) -> WorkerSteps | None:
    worker_steps = tuple(steps for steps in worker_steps if steps)
    on = Counter(j for steps in worker_steps for j in {step.stage for step in steps})
    if shared := [j for j, lines in on.items() if lines > 1]:
        raise ValueError(f"the steps of stage {shared[0]} are on {on[shared[0]]} workers; write them on one line")
    found = build_programs(worker_steps, max(len(programs), *(j + 1 for j in on), 0))
    if wrong := [j for j, pair in enumerate(zip_longest(found, programs)) if pair[0] != pair[1]]:
        raise ValueError(
            f"the worker steps and the programs have different steps of stage {wrong[0]}, or a different order"
        )
    return None if len(on) == len(worker_steps) else worker_steps


def build_programs(worker_steps: Sequence[tuple[Step, ...]], stages: int) -> list[Program]:
    found: list[list[Action]] = [[] for _ in range(stages)]
    for stage, action in chain.from_iterable(worker_steps):
        found[stage].append(action)
    return [*map(tuple, found)]


def _places(worker_steps: WorkerSteps) -> dict[int, int]:
    return {step.stage: worker for worker, steps in enumerate(worker_steps) for step in steps}


def merge(programs: Sequence[Program], placement: Sequence[int]) -> WorkerSteps:
    """Merge programs into the steps of each worker, as if every action took one tick and started as soon as it can.

    If several stages of a worker could start at the same tick, the last stage does, which keeps fewer micro-batches in
    flight. With all stages on one worker, no step waits in this order.

    Args:
        programs: the program of each stage.
        placement: the worker of each stage, counted from 0.

    Returns:
        The steps of each worker, in order.

    Raises:
        ValueError: the programs wait for each other forever; the message names the steps.

    >>> from gpipe.schedule import fill_drain
    >>> print(*merge(fill_drain(2, 2), (0, 0))[0])
    F0@0 F0@1 F1@0 F1@1 B1@1 B0@1 B1@0 B0@0
    """
    upcoming = [[Step(j, action) for action in reversed(program)] for j, program in enumerate(programs)]
    # A schedule may contain only forwards or only backwards: steps in no program count as done.
    present, done = set(chain.from_iterable(upcoming)), set[Step]()
    worker_steps: list[list[Step]] = [[] for _ in range(max(placement, default=-1) + 1)]
    owns = [
        [j for j in reversed(range(len(programs))) if placement[j] == worker] for worker in range(len(worker_steps))
    ]

    @cache  # a step is asked about once per tick until it is ready
    def sources(step: Step) -> set[Step]:
        return present.intersection(dependencies_of(step))

    def is_ready(step: Step) -> bool:
        needed = sources(step)
        return not needed or not done.isdisjoint(needed)

    while heads := [queue[-1] for queue in upcoming if queue]:
        ready = {step.stage: step for step in heads if is_ready(step)}
        begun = [ready[next(j for j in own if j in ready)] for own in owns if not ready.keys().isdisjoint(own)]
        if not begun:
            raise deadlock(heads)
        for step in begun:  # after the scan, as results of this tick are available at the next
            worker_steps[placement[step.stage]].append(upcoming[step.stage].pop())
        done.update(begun)
    return tuple(map(tuple, worker_steps))
