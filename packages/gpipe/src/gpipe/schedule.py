"""What happens on which stage, and in which order, as plain data.

A **program** lists the actions of one stage in order; a **schedule** holds the program of every stage. Nothing here
runs anything: schedules can be printed, read back, compared, and proved free of deadlocks in milliseconds.
:mod:`gpipe.pipeline` walks them.

In text an action is a letter and its micro-batch::

    F forward   R recompute   B backward   I backward for the inputs   W backward for the weights
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from ._actions import LETTERS, Action, Kind, Program, Step, Walk, requirement
from ._meant import did_you_mean
from ._order import deal, merge, replay, start_ticks


class Schedule(tuple[Program, ...]):
    """The program of each stage: a tuple of tuples of :class:`Action`.

    Where several stages share a worker, their order among each other matters too. ``walk`` gives it; without, workers
    take what can start first (:func:`merge`). It is None where every stage has a worker of its own, because then it
    says nothing that the programs do not. Schedules are equal if their programs and walks are.

    Raises ValueError if ``walk`` has other steps than ``programs``, or a stage on two workers.

    ``str()`` writes a line for each worker, which :meth:`parse` reads back.

    >>> print(one_forward_one_backward(3, 2))
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2
    """

    walk: Walk | None

    def __new__(cls, programs: Iterable[Iterable[Action]], walk: Walk | None = None) -> Schedule:
        schedule = super().__new__(cls, tuple(map(tuple, programs)))
        schedule.walk = None if walk is None else _telling(walk, schedule)
        return schedule

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) and self.walk == getattr(other, "walk", None)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # A schedule without a walk equals the tuple of its programs.
        own = tuple.__hash__(self)
        return own if self.walk is None else hash((own, self.walk))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that ``text`` describes: a line for each worker, with actions such as ``F0`` or ``B3@2``.

        An action without ``@stage`` belongs to the stage of its line's number. Dots, which draw idle time, and what
        follows ``#`` are passed over.

        Raises ValueError naming line and word if something cannot be read.

        >>> Schedule.parse("F0 F1 . . B1 B0  # all forwards first") == fill_drain(2, 1)
        True
        """
        lines = [line.split("#")[0].split() for line in text.splitlines()]
        walk = tuple(
            tuple(_read(word, number) for word in words if word.strip("."))
            for number, words in enumerate([words for words in lines if words])
        )
        stages = 1 + max((step.stage for steps in walk for step in steps), default=-1)
        return cls(([s.action for steps in walk for s in steps if s.stage == j] for j in range(stages)), walk)

    def on(self, placement: Sequence[int]) -> Walk:
        """The steps of each worker, where stage j runs on worker ``placement[j]``.

        Where ``walk`` was written for other workers, steps go in the order in which those would begin them: so any two
        that share a worker here and there keep their order.

        Raises ValueError if the workers that it was written for would wait for each other for ever.
        """
        if self.walk is None:
            return merge(self, placement)
        return self.walk if _places(self.walk) == dict(enumerate(placement)) else deal(self.walk, placement)

    def recomputing(self, checkpoint_stop: int) -> Schedule:
        """The same with a recomputation just before each backward of a micro-batch below ``checkpoint_stop``.

        Where there is one already, it stays where it is.

        >>> print(Schedule.parse("F0 F1 B0 B1").recomputing(1))
        F0 F1 R0 B0 B1
        """
        walk = self.walk or tuple(tuple(Step(j, action) for action in program) for j, program in enumerate(self))
        present = {step for own in walk for step in own}
        steps = [[each for step in own for each in _recomputing(step, present, checkpoint_stop)] for own in walk]
        programs = [[s.action for own in steps for s in own if s.stage == j] for j in range(len(self))]
        return Schedule(programs, None if self.walk is None else tuple(map(tuple, steps)))

    def __str__(self) -> str:
        walk = self.walk or tuple(tuple(Step(j, action) for action in program) for j, program in enumerate(self))
        alone = all(step.stage == number for number, steps in enumerate(walk) for step in steps)
        return "\n".join(" ".join(str(step.action if alone else step) for step in steps) for steps in walk)


__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Program",
    "Schedule",
    "Step",
    "Walk",
    "clock_cycles",
    "fill_drain",
    "halves",
    "in_flight",
    "interleaved",
    "merge",
    "named",
    "one_forward_one_backward",
    "replay",
    "requirement",
    "start_ticks",
    "validate",
    "zero_bubble",
]

_WORD = re.compile(r"([FRBIW])(\d+)(?:@(\d+))?")


def _read(word: str, line: int) -> Step:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(
            f"cannot read {word!r} in line {line + 1} of the schedule; an action is one of the letters "
            f"{' '.join(LETTERS.values())}, a micro-batch, and perhaps @stage, as in F0 or B3@2"
        )
    letter, microbatch, stage = match.groups()
    kind = next(kind for kind, own in LETTERS.items() if own == letter)
    return Step(line if stage is None else int(stage), Action(kind, int(microbatch)))


def _recomputing(step: Step, present: set[Step], checkpoint_stop: int) -> Iterator[Step]:
    stage, (kind, i) = step
    needed = Step(stage, Action("recompute", i))
    if kind in ("backward", "backward_input") and i < checkpoint_stop and needed not in present:
        yield needed
    yield step


def _telling(walk: Walk, programs: Sequence[Program]) -> Walk | None:
    """``walk``, unless it says no more than ``programs``."""
    walk = tuple(steps for steps in walk if steps)
    for j, program in enumerate(programs):
        lines = [[step.action for step in steps if step.stage == j] for steps in walk]
        lines = [line for line in lines if line]
        if len(lines) > 1:
            raise ValueError(f"the steps of stage {j} are on {len(lines)} workers; write them on one line")
        if [action for line in lines for action in line] != list(program):
            raise ValueError(f"the walk and the programs have other steps of stage {j}, or in another order")
    return None if all(step.stage == steps[0].stage for steps in walk for step in steps) else walk


def _places(walk: Walk) -> dict[int, int]:
    return {step.stage: worker for worker, steps in enumerate(walk) for step in steps}


def clock_cycles(microbatches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """The cells (micro-batch i, stage j) that may run at the same clock tick: those with i + j = tick.

    There are ``microbatches + stages - 1`` ticks (GPipe, section 2.3).

    >>> list(clock_cycles(3, 2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    """
    for tick in range(microbatches + stages - 1 if microbatches and stages else 0):
        first = max(tick - microbatches + 1, 0)
        yield [(tick - j, j) for j in range(first, min(tick + 1, stages))]


def fill_drain(microbatches: int, stages: int, checkpoint_stop: int = 0) -> Schedule:
    """All forwards, then all backwards in reverse; holds every micro-batch at once (GPipe, arXiv 1811.06965).

    Micro-batches below ``checkpoint_stop`` are checkpointed. Their graph is rebuilt just before their backward, in
    the time a stage would otherwise wait for the gradient::

        F0 F1 F2 .  .  .  R2 B2 R1 B1 R0 B0
        .  F0 F1 F2 R2 B2 R1 B1 R0 B0 .  .

    >>> print(fill_drain(2, 1, checkpoint_stop=1))
    F0 F1 B1 R0 B0
    """
    forwards = [Action("forward", i) for i in range(microbatches)]
    backwards = [action for i in reversed(range(microbatches)) for action in _backward(i, checkpoint_stop)]
    return Schedule([(*forwards, *backwards)] * stages)


def one_forward_one_backward(microbatches: int, stages: int, checkpoint_stop: int = 0) -> Schedule:
    """Backwards as soon as they can be: as fast as fill-drain, with stage j holding n − j micro-batches at most.

    Source: PipeDream-Flush (Narayanan et al., arXiv 2006.09503)::

        F0 F1 F2 .  B0 F3 B1 .  B2 .  B3
        .  F0 F1 B0 F2 B1 F3 B2 .  B3 .
    """
    return Schedule(_one_by_one(microbatches, stages - j, checkpoint_stop) for j in range(stages))


def _one_by_one(microbatches: int, in_flight: int, checkpoint_stop: int) -> Iterator[Action]:
    ahead = min(in_flight, microbatches)
    yield from (Action("forward", i) for i in range(ahead))
    for i in range(microbatches):
        yield from _backward(i, checkpoint_stop)
        if i + ahead < microbatches:
            yield Action("forward", i + ahead)


def interleaved(microbatches: int, stages: int, workers: int, checkpoint_stop: int = 0) -> Schedule:
    """1F1B with several stages a worker, stage j on worker j mod k: a bubble as many times smaller.

    A group of k micro-batches goes through the first stage of every worker, then through the second ones, and so on.
    With v = n / k stages a worker the bubble is that of k stages divided by v, for m divisible by k. Each worker holds
    at most 2(k − r − 1) + (v − 1)k + 1 micro-batches of one stage, r being its number.

    Source: Megatron-LM (Narayanan et al., arXiv 2104.04473, section 2.2).

    Raises ValueError if the stages cannot be dealt out evenly.
    """
    if workers < 1 or stages % workers:
        raise ValueError(
            f"interleaving deals the same number of stages to every worker: {stages} stages do not go evenly on "
            f"{workers} workers; choose a balance with a multiple of {workers} partitions"
        )
    walk = tuple(tuple(_interleaved(microbatches, stages, workers, r, checkpoint_stop)) for r in range(workers))
    programs = [[s.action for s in walk[j % workers] if s.stage == j] for j in range(stages)] if workers else []
    return Schedule(programs, walk)


def _interleaved(microbatches: int, stages: int, workers: int, r: int, checkpoint_stop: int) -> Iterator[Step]:
    # Groups are whole, and steps of micro-batches that do not exist are left out: what remains is still in an order
    # that some run of the whole takes.
    groups = [range(first, first + workers) for first in range(0, microbatches, workers)]
    own = range(r, stages, workers)
    forwards = [(j, i) for group in groups for j in own for i in group]
    backwards = [(j, i) for group in groups for j in reversed(own) for i in group]
    ahead = min(len(forwards), 2 * (workers - r - 1) + (len(own) - 1) * workers)
    rest = iter(forwards[ahead:])
    yield from (Step(j, Action("forward", i)) for j, i in forwards[:ahead] if i < microbatches)
    for j, i in backwards:
        yield from (Step(k, Action("forward", h)) for k, h in islice(rest, 1) if h < microbatches)
        if i < microbatches:
            yield from (Step(j, action) for action in _backward(i, checkpoint_stop))


def zero_bubble(microbatches: int, stages: int, checkpoint_stop: int = 0) -> Schedule:
    """1F1B with the backward split: the gradient of the input goes on at once, those of the weights fill the bubble.

    Stage j puts off the weights of j micro-batches, so that every stage holds n of them at most. If a forward and both
    parts of the backward take the same time and m ≥ n, the bubble is n − 1 such times, a third of 1F1B's.

    Source: ZB-H1 (Qi et al., arXiv 2401.10241)::

        F0 F1 .  I0 W0 F2 I1 W1 I2 W2
        .  F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    return Schedule(_split_one_by_one(microbatches, stages, j, checkpoint_stop) for j in range(stages))


def _split_one_by_one(microbatches: int, stages: int, j: int, checkpoint_stop: int) -> Iterator[Action]:
    ahead = min(stages - j, microbatches)
    yield from (Action("forward", i) for i in range(ahead))
    for i in range(microbatches):
        yield from _backward(i, checkpoint_stop, "backward_input")
        if i >= j:
            yield Action("backward_weight", i - j)
        if i + ahead < microbatches:
            yield Action("forward", i + ahead)
    yield from (Action("backward_weight", i) for i in range(max(0, microbatches - j), microbatches))


def _backward(i: int, checkpoint_stop: int, kind: Kind = "backward") -> Iterator[Action]:
    if i < checkpoint_stop:
        yield Action("recompute", i)
    yield Action(kind, i)


def halves(schedule: Sequence[Program]) -> tuple[Schedule, Schedule]:
    """Cut programs whose forwards all come first where the caller gets the outputs: (forwards, the rest)."""
    forwards = [[action for action in program if action.kind == "forward"] for program in schedule]
    rests = [program[len(head) :] for program, head in zip(schedule, forwards, strict=True)]
    return Schedule(forwards), Schedule(rests)


def named(name: str, microbatches: int, placement: Sequence[int], checkpoint_stop: int = 0) -> Schedule:
    """The schedule called ``name``, in capitals or not, for stages on the workers of ``placement``.

    Raises ValueError, with the list of names, if there is none.
    """
    if name.lower() not in SCHEDULES:
        raise ValueError(
            f"there is no schedule {name!r}; choose one of {', '.join(map(repr, SCHEDULES))}"
            + did_you_mean(name, SCHEDULES)
        )
    return SCHEDULES[name.lower()](microbatches, placement, checkpoint_stop)


def _looped(microbatches: int, placement: Sequence[int], checkpoint_stop: int) -> Schedule:
    workers = len(set(placement))
    if list(placement) != [j % workers for j in range(len(placement))]:
        raise ValueError(
            f"interleaving takes the workers in turn, as in devices=[0, 1, 0, 1]; these stages are on workers "
            f"{list(placement)}"
        )
    return interleaved(microbatches, len(placement), workers, checkpoint_stop)


def _plain(make: Callable[[int, int, int], Schedule]) -> Callable[[int, Sequence[int], int], Schedule]:
    return lambda microbatches, placement, stop: make(microbatches, len(placement), stop)


SCHEDULES: dict[str, Callable[[int, Sequence[int], int], Schedule]] = {
    "fill_drain": _plain(fill_drain),
    "1f1b": _plain(one_forward_one_backward),
    "interleaved": _looped,
    "zero_bubble": _plain(zero_bubble),
}


def validate(schedule: Schedule, microbatches: int, placement: Sequence[int]) -> None:
    """Raise ValueError, naming the action, unless ``schedule`` trains ``microbatches`` micro-batches on these stages.

    Every stage does each forward once, and after it either one backward or one backward for the inputs and then one for
    the weights, with at most one recomputation before; and the workers never wait for each other for ever.
    """
    if len(schedule) != len(placement):
        raise ValueError(f"the schedule is for {len(schedule)} stages, the pipe has {len(placement)}")
    for j, program in enumerate(schedule):
        seen: set[Action] = set()
        for action in program:
            _expect_in_place(Step(j, action), seen, microbatches)
            seen.add(action)
        for i in range(microbatches):
            _expect_complete(j, i, seen)
    replay(schedule.on(placement))


_AFTER: dict[Kind, tuple[Kind, ...]] = {
    "forward": (),
    "recompute": ("forward",),
    "backward": ("forward",),
    "backward_input": ("forward",),
    "backward_weight": ("backward_input",),
}
_INSTEAD: dict[Kind, Kind] = {"backward": "backward_input", "backward_input": "backward"}


def _expect_in_place(step: Step, seen: set[Action], microbatches: int) -> None:
    kind, i = step.action
    if i >= microbatches:
        raise ValueError(f"{step} is of micro-batch {i}, but there are {microbatches}, counted from 0")
    if step.action in seen:
        raise ValueError(f"{step} occurs twice")
    for before in _AFTER[kind]:
        if Action(before, i) not in seen:
            raise ValueError(f"{step} comes before {Step(step.stage, Action(before, i))}, which it needs")
    if kind in _INSTEAD and Action(_INSTEAD[kind], i) in seen:
        raise ValueError(f"{step} comes after {Step(step.stage, Action(_INSTEAD[kind], i))}, which does the same")
    if kind == "recompute" and not seen.isdisjoint({Action("backward", i), Action("backward_input", i)}):
        raise ValueError(f"{step} comes after the backward that it is for")


def _expect_complete(j: int, i: int, seen: set[Action]) -> None:
    if Action("forward", i) not in seen:
        raise ValueError(f"{Step(j, Action('forward', i))} is missing")
    if Action("backward", i) not in seen:
        kind: Kind = "backward_weight" if Action("backward_input", i) in seen else "backward"
        if Action(kind, i) not in seen:
            raise ValueError(f"{Step(j, Action(kind, i))} is missing")


def in_flight(program: Program) -> int:
    """The most micro-batches of which a stage with this program holds something at once."""
    held = most = 0
    splits = any(action.kind == "backward_weight" for action in program)
    for kind, _ in program:
        held += (kind == "forward") - (kind == ("backward_weight" if splits else "backward"))
        most = max(most, held)
    return most
