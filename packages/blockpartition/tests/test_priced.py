from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockpartition import _squares, partition, verify
from blockpartition._priced import cheapest, least_squares

from . import oracle
from .cases import cases
from .counting import steps

COSTS = st.lists(st.integers(0, 9) | st.integers(0, 500), min_size=1, max_size=9)


def squares(prefix, ends):
    return sum((prefix[end] - prefix[start]) ** 2 for start, end in pairwise(ends))


@given(COSTS, st.data())
@example([1, 1, 1, 1], None)
@example([0, 0, 0, 5], None)
def test_no_blocks_of_that_number_have_smaller_squares(costs, data):
    prefix = list(accumulate(costs, initial=0))
    for k in range(1, len(costs) + 1) if data is None else [data.draw(st.integers(1, len(costs)))]:
        bottleneck = oracle.least_bottleneck(costs, k)
        ends = least_squares(prefix, bottleneck, k)
        assert (ends[0], ends[-1], len(ends)) == (0, len(costs), k + 1)
        assert all(start < end for start, end in pairwise(ends))
        assert max(prefix[end] - prefix[start] for start, end in pairwise(ends)) == bottleneck
        assert squares(prefix, ends) == oracle.least_squares(costs, k)


@given(COSTS, st.integers(-1, 10**4), st.data())
def test_at_a_price_nothing_is_cheaper(costs, price, data):
    prefix = list(accumulate(costs, initial=0))
    bottleneck = data.draw(st.integers(max(costs), sum(costs)))
    best = [0]
    for end in range(1, len(prefix)):
        fits = [start for start in range(end) if prefix[end] - prefix[start] <= bottleneck]
        best.append(min(best[start] + 2 * (prefix[end] - prefix[start]) ** 2 + price for start in fits))
    ends = cheapest(prefix, bottleneck, price)
    assert 2 * squares(prefix, ends) + price * (len(ends) - 1) == best[-1]


def heavy_tail(seed, n):
    random = Random(seed)
    return [int(10 * random.paretovariate(1.1)) for _ in range(n)]


@cases("seed", range(max(3, settings.default.max_examples // 20)))
def test_both_searches_find_equally_even_partitions(seed):
    costs = heavy_tail(seed, 120)
    found = []
    for many in (0, 10**9):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_squares, "_MANY", many)
            found.append(partition(costs, 10 + 5 * seed % 60, even="exact"))
    for each in found:
        verify(each, costs)
    assert len({sum(load**2 for load in each.loads) for each in found}) == 1


@pytest.mark.timeout(60)
def test_heavy_tails_take_few_steps_a_layer():
    few, many = (steps(partition, heavy_tail(0, n), n // 10, even="exact") for n in (300, 2400))
    assert many < 8 * 3 * few
