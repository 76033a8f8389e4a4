from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import Stage, place

from .cases import cases
from .strategies import SMALL


@given(st.lists(SMALL, min_size=1, max_size=20), st.data(), st.integers(1, 20))
def test_equal_stages_without_transfers_have_the_same_best_for_both(costs, data, m):
    """The latency is the sum of all costs, wherever the cuts are."""
    k = data.draw(st.integers(1, len(costs)))
    found = place(costs, k, objective="makespan", microbatches=m)
    assert found.makespan == sum(map(Fraction, costs)) + (m - 1) * place(costs, k).bottleneck


@given(st.lists(st.integers(1, 30), min_size=2, max_size=12), st.data(), st.integers(2, 20))
def test_the_stated_gap_is_true_of_the_exact_answer(costs, data, m):
    k = data.draw(st.integers(2, len(costs)))
    transfer = data.draw(st.lists(st.integers(0, 30), min_size=len(costs), max_size=len(costs)))
    exact = place(costs, k, transfer=transfer, objective="makespan", microbatches=m)
    rough = place(costs, k, transfer=transfer, objective="makespan", microbatches=m, gap=0.5)
    assert exact.gap == 0
    assert exact.makespan <= rough.makespan <= exact.makespan * (1 + Fraction(rough.gap))
    assert rough.gap <= 0.5


def test_no_more_gap_is_stated_than_is_left():
    for costs in ([1, 2, 3], [0, 0]):
        assert place(costs, 1, microbatches=2, objective="makespan", gap=1).gap == 0


def test_a_gap_ends_the_search_where_the_exact_one_looks_long():
    costs = [(7 * i * i) % 101 + 1 for i in range(120)]
    transfer = [(13 * i * i) % 89 for i in range(120)]
    stages = [Stage(1 + j % 3) for j in range(12)]
    found = place(costs, stages, transfer=transfer, objective="makespan", microbatches=8, gap=0.02)
    assert 0 < found.gap <= 0.02


def test_the_number_of_microbatches_is_needed():
    with pytest.raises(ValueError, match=r"^objective='makespan' depends on how many micro-batches there are"):
        place([1, 2], 2, objective="makespan")


@cases(
    ("gap", "error", "message"),
    [
        (-0.1, ValueError, r"^gap must not be negative, got -0.1$"),
        (float("nan"), ValueError, r"^gap must be finite, got nan$"),
        ("1%", TypeError, r"^gap must be an int, a float or a Fraction, got '1%' of type str$"),
    ],
)
def test_impossible_gaps(gap, error, message):
    with pytest.raises(error, match=message):
        place([1, 2], 2, objective="makespan", microbatches=2, gap=gap)
