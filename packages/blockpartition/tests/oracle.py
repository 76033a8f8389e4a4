"""Every partition there is, in rational arithmetic: slow, obvious, right."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise


def all_ends(n: int, k: int) -> Iterator[tuple[int, ...]]:
    """0, the ends of k non-empty blocks, …, n."""
    return ((0, *cuts, n) for cuts in combinations(range(1, n), k - 1))


def loads(costs: list, ends: tuple[int, ...]) -> list[Fraction]:
    return [sum(map(Fraction, costs[start:end]), Fraction(0)) for start, end in pairwise(ends)]


def least_bottleneck(costs: list, k: int) -> Fraction:
    return min(max(loads(costs, ends)) for ends in all_ends(len(costs), k))


def least_squares(costs: list, k: int) -> Fraction:
    """The least sum of squared loads among the partitions with the least bottleneck."""
    choices = [loads(costs, ends) for ends in all_ends(len(costs), k)]
    bottleneck = min(map(max, choices))
    return min(sum((load**2 for load in choice), Fraction(0)) for choice in choices if max(choice) == bottleneck)
