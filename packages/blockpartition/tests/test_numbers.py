import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import place, solve, verify
from blockpartition._numbers import ceiling, number, read

from .cases import cases
from .oracle import agrees
from .strategies import FLOATS, FRACTIONS, INTS, costs


@given(costs(min_size=0, max_size=30))
def test_the_grid_holds_every_number_exactly(numbers):
    grid = read(numbers)
    assert [Fraction(unit, grid.scale) for unit in grid.units] == [Fraction(x) for x in numbers]


@given(costs(max_size=30))
def test_sums_come_back_exact_or_correctly_rounded(numbers):
    grid = read(numbers)
    assert agrees(grid.value(sum(grid.units)), sum(map(Fraction, numbers)))


@given(st.lists(INTS, min_size=1))
def test_ints_stay_ints(numbers):
    assert type(read(numbers).value(sum(numbers))) is int


@given(st.lists(FLOATS, min_size=1), st.lists(INTS | FRACTIONS))
def test_one_float_makes_floats_as_in_python(floats, others):
    value = read([*others, *floats]).value(1)
    assert type(value) is float


@given(st.lists(FRACTIONS, min_size=1), st.lists(INTS))
def test_fractions_make_fractions(fractions, ints):
    assert type(read([*ints, *fractions]).value(1)) is Fraction


@cases("kind", [int, float, Fraction])
def test_whole_numbers_stay_of_their_kind(kind):
    """Floats beyond 2⁵³ and fractions without a rest are on the same grid as ints."""
    grid = read([kind(2**60), kind(2**61)])
    assert [grid.value(unit) for unit in grid.units] == [2**60, 2**61]
    assert {type(grid.value(unit)) for unit in grid.units} == {kind}


def test_beyond_the_floats_a_sum_is_a_fraction():
    assert read([1.7e308, 1.7e308]).value(2**2000) == Fraction(2**2000)
    assert solve([1.7e308] * 4, 2) == [[1.7e308] * 2] * 2


@given(st.fractions(0), st.sampled_from([int, float, Fraction]), st.integers(1, 99))
def test_ceiling_is_never_less(value, kind, scale):
    above = ceiling(value / scale, kind)
    assert above >= value / scale
    assert kind is not float or math.nextafter(above, 0) < value / scale or above == 0
    assert kind is float or above == value / scale


def test_a_quotient_of_ints_is_an_int_where_it_can_be():
    assert repr(number(6, 3, int)) == "2"
    assert repr(number(6, 4, int)) == "Fraction(3, 2)"


class IntLike(int):
    """Neither int nor bool by type, but an integer all the same."""


def test_subclasses_of_numbers_are_numbers():
    assert read([IntLike(3), 4]).units == [3, 4]
    assert read([IntLike(3), 4]).kind is int


BAD_TYPES = [True, "3", b"3", None, 1j, [1], Decimal("1.5"), object]
BAD_VALUES = [math.nan, math.inf, -math.inf, -1, -0.5, Fraction(-1, 3), -(10**400), -5e-324]


@cases("bad", BAD_TYPES)
@cases("others", [[], [1], [0.5], [Fraction(1, 2)]])
def test_other_types_are_refused_by_index(others, bad):
    with pytest.raises(TypeError, match=rf"^sequence\[{len(others)}\] must be an int, a float or a Fraction, got "):
        solve([*others, bad, *others], 1)


@cases("bad", BAD_VALUES)
@cases("others", [[], [1], [0.5], [Fraction(1, 2)]])
def test_impossible_values_are_refused_by_index(others, bad):
    with pytest.raises(ValueError, match=rf"^sequence\[{len(others)}\] must (be finite|not be negative), got "):
        solve([*others, bad, *others], 1)


def test_a_cost_is_named_as_the_caller_named_it():
    with pytest.raises(ValueError, match=r"^costs\[1\] must not be negative, got -1$"):
        verify(place([1], 1), [1, -1], 1)


def test_numpy_scalars_are_numbers_where_numpy_is():
    numpy = pytest.importorskip("numpy")
    assert read([numpy.float32(0.5), numpy.float64(0.25), numpy.int64(2)]).units == [2, 1, 8]
    with pytest.raises(TypeError, match=r"costs\[0\]"):
        read([numpy.bool_(True)])


@cases("bad", [-(10**5000), Fraction(-(10**5000), 3)])
def test_a_number_too_long_to_print_is_refused_for_what_it_is(bad):
    with pytest.raises(ValueError, match=r"^sequence\[0\] must not be negative, got a number too long to print$"):
        solve([bad], 1)
    with pytest.raises(ValueError, match=r"^2 layers cannot fill a number too long to print stages"):
        solve([1, 2], 10**5000)
