"""Exact arithmetic: convert costs to integers over a common denominator."""

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
    """The unit of integers: `scale` of them make one of the caller's unit; `rounded` if the caller passed floats."""

    scale: int
    rounded: bool

    def value(self, units: int | Fraction) -> Number:
        """Convert to the caller's unit: exactly, or to the nearest float if `rounded` and it does not overflow."""
        numerator, denominator = units.numerator, units.denominator * self.scale
        if self.rounded and numerator <= _LARGEST * denominator:
            return numerator / denominator
        return Fraction(numerator, denominator) if numerator % denominator else numerator // denominator


@dataclass(frozen=True, eq=False)
class Grid(Scale):
    """Numbers as integers: number i is exactly `units[i] / scale`."""

    units: list[int]


def read(values: Iterable[Any], name: str = "costs") -> Grid:
    """Convert finite numbers ≥ 0 to a common denominator. Errors name the first invalid number."""
    numbers = to_list(values, name)
    kinds = set(map(type, numbers))
    if kinds <= {int} and min(numbers, default=0) >= 0:
        return Grid(1, False, numbers)
    if kinds == {float} and math.isfinite(total := sum(numbers)) and (smallest := min(numbers)) >= 0:
        # A double is a multiple of the last bit of any smaller double, so the smallest determines the denominator.
        bits = max(0, 53 - math.frexp(smallest or min(filter(None, numbers), default=1.0))[1])
        if bits + max(0, math.frexp(total)[1]) <= 1000:  # the products stay within the range of floats
            return Grid(2**bits, True, list(map(float.__trunc__, map(mul, numbers, repeat(2.0**bits)))))
    ratios = [ratio(x, f"{name}[{i}]") for i, x in enumerate(numbers)]
    scale = math.lcm(*{x.denominator for x in ratios})
    return Grid(scale, has_floats(numbers), [x.numerator * (scale // x.denominator) for x in ratios])


def to_list(values: Iterable[Any], name: str) -> list[Any]:
    """Convert values to a list; raise TypeError if they are not an ordered collection."""
    if isinstance(values, list):
        return values
    try:
        numbers = iter(values)
    except TypeError:  # 0-d arrays raise it although they have __iter__
        numbers = None
    if numbers is None or isinstance(values, (str, bytes, Mapping, Set)):
        raise TypeError(f"{name} must be a sequence of numbers, such as a list, got {values!r}")
    return list(numbers)


def ratio(x: Any, name: str) -> Fraction:
    """Convert a finite number ≥ 0 exactly; errors contain `name`."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} must be an int, a float or a Fraction, got {x!r} of type {type(x).__name__}")
    real: Any = x
    try:
        # Fraction rejects real numbers such as NumPy's float32, although they have as_integer_ratio(), and would keep
        # NumPy integers, which overflow.
        pair = (x.numerator, x.denominator) if isinstance(x, Rational) else real.as_integer_ratio()
        exact = Fraction(*map(int, pair))
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be finite, got {x!r}") from None
    if exact < 0:
        raise ValueError(f"{name} must not be negative, got {x!r}")
    return exact


def ceiling(exact: Fraction, rounded: bool) -> Number:
    """Round up to a float if `rounded`; return the exact number otherwise, or if the float would be infinite."""
    nearest = Scale(1, rounded).value(exact)
    above = nearest if nearest >= exact else math.nextafter(nearest, math.inf)
    return exact if above == math.inf else above


def has_floats(numbers: Iterable[Any]) -> bool:
    return not all(isinstance(x, Rational) for x in numbers)
