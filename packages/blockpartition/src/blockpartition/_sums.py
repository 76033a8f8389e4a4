"""Sums of costs in equal steps: exact as ints, or as floats that are quick to add up and to compare."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, islice
from operator import sub
from typing import Any

from ._grid import are_all

_EXPONENTS = range(-900, 1000)  # of a total: neither its steps nor sums of a few totals leave the range of floats


@dataclass(frozen=True)
class Sums:
    """`prefix[i] - prefix[0]` is the sum of the first i costs, each rounded to a multiple of `unit`.

    unit: 1, or a power of two; all differences of sums are exact.
    heaviest: the heaviest of the rounded costs, in units.
    error: how far the sum of any block may be from that of its costs, in units; 0 where nothing was rounded.
    """

    prefix: list[Any]
    unit: Any
    heaviest: int
    error: int = 0

    @property
    def layers(self) -> int:
        """How many costs there are."""
        return len(self.prefix) - 1

    @property
    def total(self) -> int:
        """Of all costs, in units."""
        return self.units(self.prefix[-1])

    def units(self, height: Any) -> int:
        """The sum, in units, that ends at this height, an element of `prefix`."""
        return self.length(height - self.prefix[0])

    def length(self, difference: Any) -> int:
        """The difference of two heights in units."""
        return int(difference // self.unit)


def prefix_sums(units: list[int]) -> list[int]:
    """0, u₀, u₀+u₁, …"""
    return list(accumulate(units, initial=0))


def exact_sums(units: list[int]) -> Sums:
    """Of ints, as ints."""
    return Sums(prefix_sums(units), 1, max(units))


def quick_sums(costs: list[Any]) -> Sums | None:
    """Of ints or of floats, as floats; None where these would not do, or where the costs are no valid costs.

    They are added to a power of two beyond all sums, where floats lie in equal steps: each addition rounds a cost to a
    multiple of the step, and all that follows, sums and differences, is exact.
    """
    total = _valid_total(costs)
    exponent = 0 if total is None else math.frexp(total)[1] + 2
    if total is None or exponent not in _EXPONENTS:
        return None
    prefix = list(accumulate(costs, initial=2.0**exponent))
    unit = 2.0 ** (exponent - 52)
    if isinstance(total, int) and unit <= 1:
        return Sums(prefix, 1.0, max(costs, default=0))
    return Sums(prefix, unit, _rounded(max(costs), prefix, unit), len(costs))


def _rounded(heaviest: float, prefix: list[float], unit: float) -> int:
    """The heaviest of the costs as they were rounded, in units."""
    below, rest = divmod(float(heaviest), unit)
    if rest == unit / 2:  # such a cost is rounded up after some sums, and down after others
        return int(max(map(sub, islice(prefix, 1, None), prefix)) // unit)
    return int(below) + (rest > unit / 2)


def _valid_total(costs: list[Any]) -> int | float | None:
    if are_all(int, costs):
        return _total_of_ints(costs)
    if not are_all(float, costs) or min(costs) < 0:
        return None
    total = sum(costs)
    return total if math.isfinite(total) else None


def _total_of_ints(costs: list[int]) -> int | None:
    try:
        array("Q", costs)  # refuses negative numbers in half the time in which min() finds them
    except OverflowError:
        return None
    return sum(costs)


def exact_sum(costs: Sequence[Any]) -> int | Fraction:
    """The sum of ints, or of floats as a Fraction."""
    if are_all(int, costs):
        return int(sum(costs))
    total, rest = Fraction(0), list(costs)
    while part := math.fsum(rest):  # what is left is less than the last digit of this part
        total += Fraction(part)
        rest.append(-part)
    return total
