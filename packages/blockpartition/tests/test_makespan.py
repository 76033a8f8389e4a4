from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import place

from .strategies import SMALL


@given(st.lists(SMALL, min_size=1, max_size=20), st.data(), st.integers(1, 20))
def test_equal_stages_without_transfers_have_the_same_best_for_both(costs, data, m):
    """The latency is the sum of all costs, wherever the cuts are."""
    k = data.draw(st.integers(1, len(costs)))
    found = place(costs, k, objective="makespan", microbatches=m)
    assert found.makespan == sum(map(Fraction, costs)) + (m - 1) * place(costs, k).bottleneck
    assert place(costs, 1, objective="makespan", microbatches=m, gap=1).gap == 0  # less than was asked for is proven


def test_the_number_of_microbatches_is_needed():
    with pytest.raises(ValueError, match=r"^objective='makespan' depends on how many micro-batches there are"):
        place([1, 2], 2, objective="makespan")
