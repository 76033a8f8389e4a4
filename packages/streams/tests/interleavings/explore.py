"""Run a program once per order of events: first without preemptions, then with one, then with two."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from .choices import Choice, Chooser, Priorities, Recorded
from .install import installed
from .scheduler import Scheduler


class Interleaving(NamedTuple):
    """One run of a program.

    Attributes:
        indices: the choices, from which the run can be repeated.
        made: the choices with their costs.
        error: the exception that the program raised, if any.
        events: a description of each event.
    """

    indices: tuple[int, ...]
    made: Sequence[Choice]
    error: BaseException | None
    events: Sequence[str]

    @property
    def injections(self) -> int:
        return sum(choice.costs[choice.index][1] for choice in self.made)


class Explored(NamedTuple):
    """The result of an exploration.

    Attributes:
        runs: the number of interleavings.
        injected: the number of interleavings with an injected failure or interrupt.
        complete: the number of preemptions up to which all interleavings were tried; -1 for none.
        failures: the runs that failed.
    """

    runs: int
    injected: int
    complete: int
    failures: tuple[Interleaving, ...]


Program = Callable[[], Any]


def run(
    program: Program, chooser: Recorded, *, lines: Collection[str] = (), injects: Collection[str] = ()
) -> Interleaving:
    """Run ``program`` under a scheduler. Its threads must end with it."""
    scheduler = Scheduler(chooser, lines=lines, injects=injects)
    error: BaseException | None = None
    with installed(scheduler):
        try:
            scheduler.run(program)
        except BaseException as caught:
            error = caught
    return Interleaving(tuple(choice.index for choice in chooser.made), chooser.made, error, scheduler.events)


def repeat(program: Program, indices: Sequence[int], **options: Any) -> Any:
    """Run ``program`` with recorded choices, and raise its exception, if any."""
    found = run(program, Recorded(indices), **options)
    if found.error is not None:
        raise found.error
    return found


def explore(
    program: Program,
    *,
    preemptions: int = 2,
    injections: int = 0,
    most: int = 10_000,
    failures: int = 1,
    seed: int = 0,
    **options: Any,
) -> Explored:
    """Try every interleaving of ``program`` with at most ``preemptions`` and ``injections``.

    Args:
        program: the program.
        preemptions: the most preemptions.
        injections: the most failures and interrupts to inject.
        most: the most runs. If there are more interleavings, those with the most preemptions are sampled at random.
        failures: the number of failures after which to stop.
        seed: the seed of the random samples.
        options: see :func:`run`.
    """
    rng = random.Random(seed)
    waiting: list[list[Prefix]] = [[] for _ in range(preemptions + 1)]
    waiting[0].append(Prefix((), (), 0))
    runs, injected, found, complete = 0, 0, [], -1
    with _Collected():
        expect_repeatable(program, **options)
        for level in range(preemptions + 1):
            prefixes = waiting[level]
            while prefixes and runs < most and len(found) < failures:
                k = rng.randrange(len(prefixes))
                prefixes[k], prefixes[-1] = prefixes[-1], prefixes[k]
                prefix = prefixes.pop()
                one = run(program, Recorded(prefix.indices), **options)
                prefix.expect_begins(one)
                runs += 1
                injected += bool(one.injections)
                if one.error is not None:
                    found.append(one)
                for cost, other in _others(one, len(prefix.indices), injections):
                    if cost <= preemptions:
                        waiting[cost].append(other)
                if runs % 200 == 0:
                    gc.collect()
            if prefixes or len(found) >= failures:
                break
            complete = level
    return Explored(runs, injected, complete, tuple(found))


class Prefix(NamedTuple):
    """The first choices of a run. All but the last are the choices of an earlier run.

    Attributes:
        indices: the choices.
        events: the events of the earlier run.
        count: the number of events before the last choice.
    """

    indices: tuple[int, ...]
    events: Sequence[str]
    count: int

    def expect_begins(self, one: Interleaving) -> None:
        """Raise AssertionError unless ``one`` begins as the earlier run did."""
        for k, (before, now) in enumerate(zip(self.events[: self.count], one.events, strict=False)):
            if before != now:
                raise AssertionError(
                    f"a run with the same choices differs after {k} steps: {now} instead of {before}; choices "
                    f"{self.indices}; error {one.error!r}"
                )


def _others(one: Interleaving, begin: int, injections: int) -> Iterator[tuple[int, Prefix]]:
    """Yield prefixes that differ from a run in one choice, from choice ``begin`` on, with their preemptions."""
    spent, injected = 0, 0
    for k, choice in enumerate(one.made):
        if k >= begin:
            for index, (cost, injecting) in enumerate(choice.costs):
                if index != choice.index and injected + injecting <= injections:
                    yield spent + cost, Prefix((*one.indices[:k], index), one.events, choice.step)
        cost, injecting = choice.costs[choice.index]
        spent, injected = spent + cost, injected + injecting


def sample(
    program: Program,
    *,
    runs: int,
    depth: int = 3,
    injections: int = 0,
    failures: int = 1,
    seed: int = 0,
    **options: Any,
) -> Explored:
    """Try random priorities, for programs with too many interleavings. See :class:`Priorities`."""
    found: list[Interleaving] = []
    injected = 0
    with _Collected():
        steps = expect_repeatable(program, **options)
        for number in range(runs):
            one = run(program, Priorities(seed * runs + number, steps, depth, injections), **options)
            injected += bool(one.injections)
            if one.error is not None:
                found.append(one)
            if len(found) >= failures:
                break
    return Explored(runs, injected, -1, tuple(found))


def expect_repeatable(program: Program, **options: Any) -> int:
    """Return the number of choices. Raise AssertionError unless two runs with the same choices are equal."""
    run(program, Recorded(), **options)  # the first run may differ, since it imports modules and fills caches
    first, second = (run(program, Recorded(), **options) for _ in range(2))
    for left, right in zip(first.events, second.events, strict=False):
        assert left == right, f"two runs with the same choices differ: {left}, then {right}"
    assert len(first.events) == len(second.events), "two runs with the same choices differ in their lengths"
    return len(first.made)


class _Collected:
    """Collect garbage only between runs, so that finalizers do not run at other steps when a run is repeated."""

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        if self._was_on:
            gc.enable()


__all__ = ["Chooser", "Explored", "Interleaving", "explore", "repeat", "run", "sample"]
