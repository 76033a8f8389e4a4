import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from blockpartition._sums import exact_sum, exact_sums, prefix_sums, quick_sums

from .cases import cases
from .strategies import CLOSE_FLOATS, FLOATS, INTS

COSTS = st.one_of(*(st.lists(kind, min_size=1, max_size=40) for kind in (INTS, FLOATS, CLOSE_FLOATS)))


@given(COSTS)
def test_no_sum_of_a_block_is_further_off_than_the_error(costs):
    sums = quick_sums(costs)
    if sums is None:
        return
    exact = prefix_sums(list(map(Fraction, costs)))
    unit = Fraction(sums.unit)
    for end in range(len(costs) + 1):
        for start in range(end):
            found = Fraction(sums.prefix[end]) - Fraction(sums.prefix[start])
            assert abs(found - (exact[end] - exact[start])) <= min(sums.error, end - start) * unit


@given(COSTS)
def test_all_differences_and_sums_of_a_height_and_a_difference_are_exact(costs):
    sums = quick_sums(costs)
    if sums is None:
        return
    last = sums.prefix[-1]
    for height in sums.prefix:
        length = last - height
        assert Fraction(length) == Fraction(last) - Fraction(height)
        assert sums.length(length) * Fraction(sums.unit) == Fraction(length)
        assert Fraction(last + length) == Fraction(last) + Fraction(length)
    assert sums.total == sums.units(last)
    assert sums.heaviest == max(sums.length(b - a) for a, b in zip(sums.prefix, sums.prefix[1:], strict=False))


@given(st.lists(st.integers(0, 2**40), min_size=1))
def test_ints_are_exact_as_floats(costs):
    sums = quick_sums(costs)
    assert (sums.error, sums.unit) == (0, 1)
    assert [sums.units(height) for height in sums.prefix] == exact_sums(costs).prefix == prefix_sums(costs)


def test_a_cost_halfway_between_two_steps_is_rounded_up_or_down():
    """To the even multiple, which depends on the sum before it."""
    step = 2.0**-48
    sums = quick_sums([9.0 + step / 2] * 2 + [step / 2, 1.0])
    assert sums.heaviest == max(sums.length(b - a) for a, b in zip(sums.prefix, sums.prefix[1:], strict=False))


@cases(
    "costs",
    [
        [1, 2.0],
        [Fraction(1), Fraction(2)],
        [1.0, -1.0],
        [1, -1],
        [2**70],
        [1.0, math.nan],
        [math.inf],
        [1e308] * 9,
        [5e-324],
        [True],
        ["1"],
    ],
)
def test_other_costs_are_left_to_the_exact_sums(costs):
    assert quick_sums(costs) is None


@given(COSTS)
def test_exact_sums_of_blocks(costs):
    if max(costs) < 1e300:
        assert exact_sum(costs) == sum(map(Fraction, costs))
