"""Numbers as integers with a common denominator, so that every cost and every sum of costs is exact."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real
from operator import countOf
from typing import Any, TypeAlias

Number: TypeAlias = int | float | Fraction


@dataclass(frozen=True)
class Grid:
    """`units[i] / scale` is the i-th number, exactly."""

    units: list[int]
    scale: int
    kind: type

    def value(self, units: int, divisor: int = 1) -> Number:
        """`units / divisor` as a number of the kind that was passed in: see `number`."""
        return number(units, self.scale * divisor, self.kind)

    def values(self, units: list[int]) -> tuple[Number, ...]:
        """`value` of each."""
        return tuple(units) if self.kind is int and self.scale == 1 else tuple(map(self.value, units))


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


def listed(values: Iterable[Any], name: str) -> list[Any]:
    """The values as a list (the same object if they are one); TypeError with this name if they are not iterable."""
    if isinstance(values, list):
        return values
    try:
        each = iter(values)
    except TypeError:
        raise TypeError(f"{name} must be numbers in a row, such as a list, got {shown(values)}") from None
    return list(each)


def read(values: Iterable[Any], name: str = "costs") -> Grid:
    """Finite numbers ≥ 0 with their common denominator; TypeError or ValueError names the first invalid one."""
    numbers = listed(values, name)
    if are_all(int, numbers):
        return _read_ints(numbers, name)
    if are_all(float, numbers) and math.isfinite(sum(numbers)):
        return _read_floats(numbers, name)
    return _read_any(numbers, name)


def are_all(kind: type, numbers: Sequence[Any]) -> bool:
    """Whether all numbers are of exactly this type."""
    return isinstance(next(iter(numbers), 0), kind) and countOf(map(type, numbers), kind) == len(numbers)


def _read_ints(numbers: list[int], name: str) -> Grid:
    try:
        array("Q", numbers)  # refuses negative numbers in half the time in which min() finds them
    except OverflowError:
        if min(numbers) < 0:
            _refuse_negative(numbers, name)
    return Grid(numbers, 1, int)


def _read_floats(numbers: list[float], name: str) -> Grid:
    smallest = min(filter(None, numbers), default=1.0)
    if smallest < 0:
        _refuse_negative(numbers, name)
    # A double is a multiple of the last bit of any smaller one, so the smallest determines the denominator.
    bits = max(0, 53 - math.frexp(smallest)[1])
    if bits + max(0, math.frexp(sum(numbers))[1]) > 1000:
        return _read_any(numbers, name)  # the products below would exceed the range of floats
    return Grid(list(map(int, map((2.0**bits).__mul__, numbers))), 2**bits, float)


def _read_any(numbers: Sequence[Any], name: str) -> Grid:
    ratios = [_ratio(x, f"{name}[{i}]") for i, x in enumerate(numbers)]
    scale = math.lcm(*{denominator for _, denominator in ratios})
    units = [numerator * (scale // denominator) for numerator, denominator in ratios]
    return Grid(units, scale, kind_of(numbers))


def kind_of(numbers: Iterable[Any]) -> type:
    """The type of a sum of these numbers: float before Fraction before int."""
    if not all(isinstance(x, Rational) for x in numbers):
        return float
    return int if all(x.denominator == 1 and not isinstance(x, Fraction) for x in numbers) else Fraction


def ratio(x: Any, name: str) -> tuple[int, int]:
    """One finite number ≥ 0 as numerator and denominator; TypeError or ValueError with this name."""
    return _ratio(x, name)


def _ratio(x: Any, name: str) -> tuple[int, int]:
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} must be an int, a float or a Fraction, got {shown(x)} of type {type(x).__name__}")
    numerator, denominator = _integer_ratio(x, name)
    if numerator < 0:
        raise ValueError(f"{name} must not be negative, got {shown(x)}")
    return numerator, denominator


def _integer_ratio(x: Any, name: str) -> tuple[int, int]:
    if isinstance(x, Rational):
        return int(x.numerator), int(x.denominator)
    try:
        numerator, denominator = x.as_integer_ratio()
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be finite, got {shown(x)}") from None
    return int(numerator), int(denominator)


def _refuse_negative(numbers: Sequence[Any], name: str) -> None:
    i, x = next((i, x) for i, x in enumerate(numbers) if x < 0)
    raise ValueError(f"{name}[{i}] must not be negative, got {shown(x)}")


def shown(x: Any, form: Callable[[Any], str] = repr) -> str:
    """The value for a message; Python refuses to print ints of more than some thousand digits."""
    try:
        return form(x)
    except ValueError:
        return "a number too long to print"


def join(*grids: Grid) -> tuple[list[list[int]], int]:
    """The units of all grids with a common denominator, and that denominator."""
    scale = math.lcm(*(grid.scale for grid in grids))
    return [[unit * (scale // grid.scale) for unit in grid.units] for grid in grids], scale


def joint_kind(*kinds: type) -> type:
    """The type of a sum of numbers of all these kinds."""
    return next(kind for kind in (float, Fraction, int) if kind in kinds)


def ceiling(value: Fraction, scale: int, kind: type) -> Number:
    """`value / scale` as a `kind`, rounded up; exact where that would be infinite."""
    exact = value / scale
    nearest = number(exact.numerator, exact.denominator, kind)
    above = nearest if nearest >= exact else math.nextafter(nearest, math.inf)
    return exact if above == math.inf else above
