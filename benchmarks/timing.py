"""Rounds in which programs take turns, so that other work on the machine slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from statistics import median, quantiles
from typing import NamedTuple, TypeVar

Clock = Callable[[], float]
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


class Step(NamedTuple):
    """A step in a process of its own: when it began and ended, on the clock that all processes share."""

    start: float
    end: float
    faults: int  # pages of memory that the process got from the system meanwhile


def interleaved(
    programs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    repeats: int = 1,
    warmups: int = 2,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds a call of each program in each round: the mean of `repeats` calls in a row."""
    return turns({name: partial(timed, program, repeats, clock) for name, program in programs.items()}, rounds, warmups)


def turns(programs: Mapping[Name, Callable[[], Result]], rounds: int, warmups: int = 0) -> dict[Name, list[Result]]:
    """What each program returns in each round; the results of the first `warmups` rounds are dropped."""
    results: dict[Name, list[Result]] = {name: [] for name in programs}
    for k in range(-warmups, rounds):
        for name, program in programs.items():
            result = program()
            if k >= 0:
                results[name].append(result)
    return results


def timed(program: Callable[[], object], repeats: int = 1, clock: Clock = time.perf_counter) -> float:
    start = clock()
    for _ in range(repeats):
        program()
    return (clock() - start) / repeats


def repeats_within(seconds: float, once: float, most: int = 1000) -> int:
    """How many calls of `once` seconds make a turn of about `seconds`."""
    return max(1, min(most, round(seconds / max(once, 1e-9))))


def ratios(above: list[float], below: list[float]) -> list[float]:
    """One ratio a round: both were measured side by side, so what slowed one slowed the other."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: list[float], digits: int = 2, scale: float = 1.0) -> str:
    """The median, and in brackets the quartiles."""
    scaled = [value * scale for value in values]
    if len(scaled) < 2:
        return f"{scaled[0]:.{digits}f}"
    low, _, high = quantiles(scaled, n=4, method="inclusive")
    return f"{median(scaled):.{digits}f} [{low:.{digits}f}–{high:.{digits}f}]"
