import math
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given

from blockpartition import partition, solve

from .cases import cases
from .oracle import agrees
from .strategies import costs


@given(costs(max_size=30))
def test_sums_are_exact_or_correctly_rounded(numbers):
    (load,) = partition(numbers, 1).loads
    assert agrees(load, sum(map(Fraction, numbers)))
    if float not in {type(x) for x in numbers}:
        assert type(load) is (int if load.denominator == 1 else Fraction)
    else:
        assert type(load) is float or load > sys.float_info.max


BAD_TYPES = [True, "3", b"3", None, 1j, [1], Decimal("1.5"), object]
BAD_VALUES = [math.nan, math.inf, -math.inf, -1, -0.5, Fraction(-1, 3), -(10**400), -5e-324]


@cases("bad", [*BAD_TYPES, *BAD_VALUES])
@cases("others", [[], [1], [0.5], [Fraction(1, 2)]])
def test_what_is_no_cost_is_refused_by_index(others, bad):
    error = TypeError if bad in BAD_TYPES else ValueError
    with pytest.raises(error, match=rf"^sequence\[{len(others)}\] must (be an int|be finite|not be negative)"):
        solve([*others, bad, *others], 1)
