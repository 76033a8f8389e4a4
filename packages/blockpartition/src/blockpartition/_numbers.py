"""Numbers as integers with a common denominator, so that every sum of costs is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat
from numbers import Integral, Rational, Real
from operator import mul
from typing import Any, TypeAlias

Number: TypeAlias = int | float | Fraction


@dataclass(frozen=True, eq=False)
class Grid:
    """`units[i] / scale` is the i-th number, exactly; `kind` is the type of a sum of them."""

    units: list[int]
    scale: int
    kind: type

    def value(self, units: int, divisor: int = 1) -> Number:
        """`units / divisor` as a number of the kind that was passed in: see `number`."""
        return number(units, self.scale * divisor, self.kind)


def read(values: Iterable[Any], name: str = "costs") -> Grid:
    """Finite numbers ≥ 0 with their common denominator; TypeError or ValueError names the first invalid one."""
    numbers = listed(values, name)
    kinds = set(map(type, numbers))
    if kinds <= {int} and min(numbers, default=0) >= 0:
        return Grid(numbers, 1, int)
    if kinds == {float} and math.isfinite(total := sum(numbers)) and (smallest := min(numbers)) >= 0:
        # A double is a multiple of the last bit of any smaller one, so the smallest determines the denominator.
        bits = max(0, 53 - math.frexp(smallest or min(filter(None, numbers), default=1.0))[1])
        if bits + max(0, math.frexp(total)[1]) <= 1000:  # the products stay within the range of floats
            return Grid(list(map(float.__trunc__, map(mul, numbers, repeat(2.0**bits)))), 2**bits, float)
    ratios = [ratio(x, f"{name}[{i}]") for i, x in enumerate(numbers)]
    scale = math.lcm(*{x.denominator for x in ratios})
    return Grid([x.numerator * (scale // x.denominator) for x in ratios], scale, kind_of(numbers))


def listed(values: Iterable[Any], name: str) -> list[Any]:
    """The values as a list (the same object if they are one); TypeError if they have no order or are no collection."""
    if isinstance(values, list):
        return values
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping, Set)):
        raise TypeError(f"{name} must be numbers in a row, such as a list, got {shown(values)}")
    return list(values)


def ratio(x: Any, name: str) -> Fraction:
    """One finite number ≥ 0, exactly; TypeError or ValueError with this name."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} must be an int, a float or a Fraction, got {shown(x)} of type {type(x).__name__}")
    real: Any = x
    try:
        exact = Fraction(x) if isinstance(x, Rational) else Fraction(*real.as_integer_ratio())
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be finite, got {shown(x)}") from None
    if exact < 0:
        raise ValueError(f"{name} must not be negative, got {shown(x)}")
    return exact


def number(numerator: int, denominator: int, kind: type) -> Number:
    """The quotient as a `kind`, exact for int and Fraction, correctly rounded for float.

    For `int`, a quotient that is not an integer is a Fraction; for `float`, one beyond the range of floats.
    """
    if kind is float:
        try:
            return numerator / denominator
        except OverflowError:
            return Fraction(numerator, denominator)
    if kind is int and numerator % denominator == 0:
        return numerator // denominator
    return Fraction(numerator, denominator)


def ceiling(exact: Fraction, kind: type) -> Number:
    """The number as a `kind`, rounded up; exact where that would be infinite."""
    nearest = number(exact.numerator, exact.denominator, kind)
    above = nearest if nearest >= exact else math.nextafter(nearest, math.inf)
    return exact if above == math.inf else above


def kind_of(numbers: Iterable[Any]) -> type:
    """The type of a sum of these numbers."""
    kinds = {int if isinstance(x, Integral) else Fraction if isinstance(x, Rational) else float for x in numbers}
    return joint_kind(*kinds)


def joint_kind(*kinds: type) -> type:
    """The type of a sum of numbers of all these kinds."""
    return max(kinds, key=(int, Fraction, float).index, default=int)


def shown(x: Any, form: Callable[[Any], str] = repr) -> str:
    """The value for a message; Python refuses to print ints of more than some thousand digits."""
    try:
        return form(x)
    except ValueError:
        return "a number too long to print"


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "block"), counted(2, "entry")
    ('1 block', '2 entries')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"
