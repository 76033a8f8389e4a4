"""Brute force over all partitions and placements, in rational arithmetic: slow, obvious, right."""

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise, product

from blockpartition import Mode, Stage


def all_ends(n: int, k: int) -> Iterator[tuple[int, ...]]:
    """0, the ends of k non-empty blocks, …, n."""
    return ((0, *cuts, n) for cuts in combinations(range(1, n), k - 1))


def total(numbers: list) -> Fraction:
    return sum(map(Fraction, numbers), Fraction(0))


def loads(costs: list, ends: tuple[int, ...]) -> list[Fraction]:
    return [total(costs[start:end]) for start, end in pairwise(ends)]


def least_bottleneck(costs: list, k: int) -> Fraction:
    return min(max(loads(costs, ends)) for ends in all_ends(len(costs), k))


def least_squares(costs: list, k: int) -> Fraction:
    """The least sum of squared loads among the partitions with the least bottleneck."""
    choices = [loads(costs, ends) for ends in all_ends(len(costs), k)]
    bottleneck = min(map(max, choices))
    return min(sum((load**2 for load in choice), Fraction(0)) for choice in choices if max(choice) == bottleneck)


def makespan(times: list[Fraction], microbatches: int) -> Fraction:
    return sum(times, Fraction(0)) + (microbatches - 1) * max(times)


def factors_of(in_flight, k: int, microbatches: int | None) -> list:
    """Return the number of micro-batches in flight per stage."""
    if isinstance(in_flight, list):
        return in_flight
    one_f_one_b = [min(k - j, microbatches or k) for j in range(k)]
    return {None: [1] * k, "1f1b": one_f_one_b, "fill_drain": [microbatches] * k}[in_flight]


def outcomes(
    costs: list,
    stages: list[Stage],
    *,
    memory=None,
    activations=None,
    in_flight=None,
    transfer=None,
    forbid=(),
    pin=(),
    microbatches=None,
) -> Iterator[list[Fraction]]:
    """Yield the cost of every stage, for every placement that satisfies the constraints."""
    n, k = len(costs), len(stages)
    alone = memory is None and activations is None
    held, kept = costs if alone else memory or [0] * n, activations or [0] * n
    factors = factors_of(in_flight, k, microbatches)
    for ends in all_ends(n, k):
        if set(ends) & set(forbid) or set(pin) - set(ends):
            continue
        for modes in product(*(stage.modes or (Mode("plain"),) for stage in stages)):
            times = []
            for stage, mode, factor, (start, end) in zip(stages, modes, factors, pairwise(ends), strict=True):
                share = factor * Fraction(mode.saved) + Fraction(mode.transient)
                need = total(held[start:end]) + share * total(kept[start:end])
                if stage.capacity is not None and need > Fraction(stage.capacity):
                    break
                sent = Fraction(transfer[end - 1]) if transfer and end < n else Fraction(0)
                took = Fraction(mode.time) * total(costs[start:end]) / Fraction(stage.speed)
                times.append(took + sent)
            else:
                yield times


def agrees(value, exact: Fraction) -> bool:
    """Return whether the value equals this number, exactly or as a correctly rounded float."""
    return value == exact or (isinstance(value, float) and value == rounded(exact))


def at_most(value, exact: Fraction) -> bool:
    """Return whether the value, before rounding to a float, can have been at most this number."""
    return value <= exact or (isinstance(value, float) and value <= rounded(exact))


def rounded(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf
