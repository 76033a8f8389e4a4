"""Every partition and placement there is, in rational arithmetic: slow, obvious, right."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, pairwise, permutations, product

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


def taut_string(low: list[int], high: list[int]) -> list[Fraction]:
    """Heights of the shortest path through the gates: from each bend, look along all gates for the next one."""
    heights = [Fraction(low[0])]
    while len(heights) < len(low):
        at, start = len(heights) - 1, heights[-1]
        turn, goal = _line_of_sight(low, high, at, start)
        heights += [start + (goal - start) * Fraction(i - at, turn - at) for i in range(at + 1, turn + 1)]
    return heights


def _line_of_sight(low: list[int], high: list[int], at: int, start: Fraction) -> tuple[int, int]:
    """The gate, and the height there, at which the string that starts at (at, start) bends first."""

    def slope(i: int, height: int) -> Fraction:
        return Fraction(height - start, i - at)

    floor = ceiling = at + 1
    for i in range(at + 1, len(low)):
        if slope(i, low[i]) > slope(ceiling, high[ceiling]):
            return ceiling, high[ceiling]
        if slope(i, high[i]) < slope(floor, low[floor]):
            return floor, low[floor]
        floor = max(floor, i, key=lambda gate: (slope(gate, low[gate]), gate))
        ceiling = min(ceiling, i, key=lambda gate: (slope(gate, high[gate]), -gate))
    return len(low) - 1, low[-1]


@dataclass
class Outcome:
    """What a placement comes to."""

    times: list[Fraction]
    latency: Fraction

    @property
    def slowest(self) -> Fraction:
        return max(self.times)

    def makespan(self, microbatches: int) -> Fraction:
        return self.latency + (microbatches - 1) * self.slowest


def outcomes(
    costs: list,
    stages: list[Stage],
    *,
    memory=None,
    activations=None,
    boundary=None,
    in_flight=None,
    transfer=None,
    overlap=False,
    forbid=(),
    pin=(),
    order="fixed",
    microbatches=None,
) -> Iterator[Outcome]:
    """Every placement that keeps the constraints."""
    n, k = len(costs), len(stages)
    lists = any(isinstance(x, tuple) for stage in stages for mode in stage.modes for x in (mode.saved, mode.transient))
    alone = memory is None and activations is None and boundary is None and not lists
    held, kept = costs if alone else memory or [0] * n, activations or [0] * n
    entering = [0] * n if boundary is None else [0] * (n - len(boundary)) + list(boundary)
    orders = [tuple(range(k))] if order == "fixed" else permutations(range(k))
    factors = {
        None: [1] * k,
        "1f1b": [min(k - j, microbatches or k) for j in range(k)],
        "fill_drain": [microbatches] * k,
    }.get(in_flight if not isinstance(in_flight, list) else "", in_flight)
    for devices in orders:
        for ends in all_ends(n, k):
            if set(ends) & set(forbid) or set(pin) - set(ends):
                continue
            for modes in product(*(stages[device].modes or (Mode("plain"),) for device in devices)):
                outcome = Outcome([], Fraction(0))
                for device, mode, factor, (start, end) in zip(devices, modes, factors, pairwise(ends), strict=True):
                    need = total(held[start:end]) + factor * amount(mode.saved, kept, start, end)
                    need += factor * Fraction(mode.boundary) * Fraction(entering[start])
                    need += amount(mode.transient, kept, start, end)
                    capacity = stages[device].capacity
                    if capacity is not None and need > Fraction(capacity):
                        break
                    compute = amount(mode.time, costs, start, end) / Fraction(stages[device].speed)
                    sent = Fraction(transfer[end - 1]) if transfer and end < n else Fraction(0)
                    outcome.times.append(max(compute, sent) if overlap else compute + sent)
                    outcome.latency += compute + sent
                else:
                    yield outcome


def amount(given, values: list, start: int, end: int) -> Fraction:
    """What a mode says of a block: a factor on the values, or values of its own."""
    if isinstance(given, tuple):
        return total(given[start:end])
    return Fraction(given) * total(values[start:end])


def agrees(value, exact: Fraction) -> bool:
    """Whether the value is this number: exactly, or as a float, correctly rounded."""
    return value == exact or (isinstance(value, float) and value == rounded(exact))


def at_most(value, exact: Fraction) -> bool:
    """Whether the value, before it was rounded to a float, can have been at most this number."""
    return value <= exact or (isinstance(value, float) and value <= rounded(exact))


def rounded(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return math.inf
