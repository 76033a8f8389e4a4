"""Make the choices of a scheduler, from a record of choices or by random priorities."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Option(NamedTuple):
    """A possible next event.

    Attributes:
        preemptions: 1 if it stops a thread that could continue, or lets time pass although a thread could continue.
        outcome: the outcome for the thread: see ``scheduler``.
        injections: 1 if it is an injected failure or interrupt.
        thread: the number of the thread that continues.
        name: its operation.
    """

    preemptions: int
    outcome: str
    injections: int
    thread: int
    name: str


class Chooser(Protocol):
    """Chooses among several options. The first one is the default."""

    def choose(self, options: Sequence[Option], step: int) -> int: ...


class Choice(NamedTuple):
    """A past choice: the index of the option, the costs of all options, and the number of the step."""

    index: int
    costs: tuple[tuple[int, int], ...]
    step: int


class Recorded:
    """Repeats the choices of an earlier run, and then chooses the default.

    Attributes:
        made: all choices so far.
    """

    def __init__(self, indices: Sequence[int] = ()) -> None:
        self._indices = indices
        self.made: list[Choice] = []

    def choose(self, options: Sequence[Option], step: int) -> int:
        k = len(self.made)
        index = self._indices[k] if k < len(self._indices) else 0
        if index >= len(options):
            raise AssertionError(f"choice {k} is {index}, but there are only {len(options)} options: {options}")
        self.made.append(Choice(index, tuple((each.preemptions, each.injections) for each in options), step))
        return index


class Priorities(Recorded):
    """Chooses by random priorities of threads, which change at a few random steps.

    A run finds a bug that needs ``depth`` ordered events with a probability of at least 1 / (threads * steps **
    (depth - 1)). Source: Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs,
    ASPLOS 2010.

    Args:
        seed: the seed of the priorities.
        steps: the approximate number of choices in the program.
        depth: the number of ordered events.
        injections: the number of failures and interrupts to inject at random choices.
    """

    def __init__(self, seed: int, steps: int, depth: int = 3, injections: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._priorities: dict[int, float] = {}
        self._changes = {self._random.randrange(max(1, steps)): -k for k in range(1, depth)}
        self._injected = {self._random.randrange(max(1, steps)) for _ in range(injections)}

    def choose(self, options: Sequence[Option], step: int) -> int:
        number, costs = len(self.made), tuple((each.preemptions, each.injections) for each in options)
        ordinary = [k for k, each in enumerate(options) if not each.injections]
        injecting = [k for k, each in enumerate(options) if each.injections]
        for each in options:
            self._priorities.setdefault(each.thread, self._random.random())
        if number in self._changes:
            highest = max(ordinary, key=lambda k: self._priorities[options[k].thread])
            self._priorities[options[highest].thread] = self._changes[number]
        index = max(ordinary, key=lambda k: (self._priorities[options[k].thread], -k))
        if injecting and any(at <= number for at in self._injected):
            self._injected = {at for at in self._injected if at > number}
            index = self._random.choice(injecting)
        self.made.append(Choice(index, costs, step))
        return index
