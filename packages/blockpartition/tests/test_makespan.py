from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import Stage, place

from .strategies import SMALL


@given(st.lists(SMALL, min_size=1, max_size=20), st.data(), st.integers(1, 20))
def test_equal_stages_without_transfers_have_the_same_best_for_both(costs, data, m):
    """The latency is the sum of all costs, wherever the cuts are."""
    k = data.draw(st.integers(1, len(costs)))
    found = place(costs, k, objective="makespan", microbatches=m)
    assert found.makespan == sum(map(Fraction, costs)) + (m - 1) * place(costs, k).bottleneck
    assert place(costs, 1, objective="makespan", microbatches=m, gap=1).gap == 0  # less than was asked for is proven


def test_a_gap_ends_the_search_where_the_exact_one_looks_long():
    costs = [(7 * i * i) % 101 + 1 for i in range(120)]
    transfer = [(13 * i * i) % 89 for i in range(120)]
    stages = [Stage(1 + j % 3) for j in range(12)]
    found = place(costs, stages, transfer=transfer, objective="makespan", microbatches=8, gap=0.02)
    assert 0 < found.gap <= 0.02


def test_the_number_of_microbatches_is_needed():
    with pytest.raises(ValueError, match=r"^objective='makespan' depends on how many micro-batches there are"):
        place([1, 2], 2, objective="makespan")
