"""Numbers as integers with a common denominator, so that every sum of costs is exact."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat
from numbers import Rational, Real
from operator import mul
from typing import Any, TypeAlias

Number: TypeAlias = int | float | Fraction

_LARGEST = int(sys.float_info.max)


@dataclass(frozen=True, eq=False)
class Scale:
    """What ints stand for: `scale` of them are one of the caller's unit; `rounded` if the caller has floats."""

    scale: int
    rounded: bool

    def value(self, units: int | Fraction) -> Number:
        """So many in the caller's unit: if rounded, the nearest float (exact beyond their range), else exact."""
        numerator, denominator = units.numerator, units.denominator * self.scale
        if self.rounded and numerator <= _LARGEST * denominator:
            return numerator / denominator
        return Fraction(numerator, denominator) if numerator % denominator else numerator // denominator


@dataclass(frozen=True, eq=False)
class Grid(Scale):
    """Numbers as ints: `units[i] / scale` is the i-th, exactly."""

    units: list[int]


def read(values: Iterable[Any], name: str = "costs") -> Grid:
    """Finite numbers ≥ 0 with their common denominator; an error names the first invalid one."""
    numbers = listed(values, name)
    kinds = set(map(type, numbers))
    if kinds <= {int} and min(numbers, default=0) >= 0:
        return Grid(1, False, numbers)
    if kinds == {float} and math.isfinite(total := sum(numbers)) and (smallest := min(numbers)) >= 0:
        # A double is a multiple of the last bit of any smaller one, so the smallest determines the denominator.
        bits = max(0, 53 - math.frexp(smallest or min(filter(None, numbers), default=1.0))[1])
        if bits + max(0, math.frexp(total)[1]) <= 1000:  # the products stay within the range of floats
            return Grid(2**bits, True, list(map(float.__trunc__, map(mul, numbers, repeat(2.0**bits)))))
    ratios = [ratio(x, f"{name}[{i}]") for i, x in enumerate(numbers)]
    scale = math.lcm(*{x.denominator for x in ratios})
    return Grid(scale, has_floats(numbers), [x.numerator * (scale // x.denominator) for x in ratios])


def listed(values: Iterable[Any], name: str) -> list[Any]:
    """The values as a list; TypeError if they have no order or are no collection."""
    if isinstance(values, list):
        return values
    try:
        numbers = iter(values)
    except TypeError:  # also of an array without dimensions, which says that it is iterable
        numbers = None
    if numbers is None or isinstance(values, (str, bytes, Mapping, Set)):
        raise TypeError(f"{name} must be numbers in a row, such as a list, got {values!r}")
    return list(numbers)


def ratio(x: Any, name: str) -> Fraction:
    """One finite number ≥ 0, exactly."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} must be an int, a float or a Fraction, got {x!r} of type {type(x).__name__}")
    real: Any = x
    try:
        # Fraction takes no other real numbers than floats; those of NumPy know their ratio. Integers of NumPy, which it
        # would keep, overflow.
        pair = (x.numerator, x.denominator) if isinstance(x, Rational) else real.as_integer_ratio()
        exact = Fraction(*map(int, pair))
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be finite, got {x!r}") from None
    if exact < 0:
        raise ValueError(f"{name} must not be negative, got {x!r}")
    return exact


def ceiling(exact: Fraction, rounded: bool) -> Number:
    """The number, rounded up if it becomes a float; exact where that would be infinite."""
    nearest = Scale(1, rounded).value(exact)
    above = nearest if nearest >= exact else math.nextafter(nearest, math.inf)
    return exact if above == math.inf else above


def has_floats(numbers: Iterable[Any]) -> bool:
    return not all(isinstance(x, Rational) for x in numbers)
