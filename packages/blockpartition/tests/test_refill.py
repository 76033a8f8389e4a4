from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import _refill
from blockpartition._fill import fill
from blockpartition._refill import Fills
from blockpartition._sums import exact_sums, quick_sums

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=60)


@pytest.fixture(params=[-1, 2, 10**9], ids=["always", "if few", "never"])
def again(request):
    """Whether blocks are filled again from those that changed."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_refill, "_FEW", request.param)
        yield


@pytest.fixture(params=[-1, 10**9], ids=["new list", "in place"])
def moved(request):
    """Whether heights are put in place in the list that there is."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_refill, "_MOVES", request.param)
        yield


@pytest.mark.usefixtures("again", "moved")
@given(COSTS, st.sampled_from([exact_sums, quick_sums]), st.data())
def test_bounds_in_any_order_give_what_each_gives_alone(costs, sums_of, data):
    blocks = data.draw(st.integers(1, len(costs)))
    sums = sums_of(costs)
    fills = Fills(sums, blocks, data.draw(st.integers(0, 9)))
    for bound in data.draw(st.lists(st.integers(max(costs), sum(costs)), min_size=1, max_size=6)):
        heights, _, _ = fill(sums.prefix, bound * sums.unit, blocks)
        found = fills.fill(bound)
        assert found.complete == (heights[-1] == sums.prefix[-1])
        missing = blocks - len(found.heights) if found.complete else 0
        assert found.heights + heights[-1:] * missing == (heights if found.complete else heights[-1:])
        if found.complete:
            loads = [sums.length(end - start) for start, end in pairwise([sums.prefix[0], *heights])]
            assert max(loads) <= found.limit <= bound
        else:
            assert bound < found.limit
            assert fill(sums.prefix, (found.limit - 1) * sums.unit, blocks)[0][-1] < sums.prefix[-1]


@pytest.mark.usefixtures("again")
def test_blocks_that_become_much_smaller_than_the_bound():
    fills = Fills(exact_sums([9, 9]), 2)
    assert fills.fill(18).heights == [18]
    found = fills.fill(17)
    assert found.heights == [9, 18]
    assert 9 <= found.limit <= 17


@pytest.mark.usefixtures("again")
def test_a_block_that_is_much_longer_than_most():
    costs = [5] * 40 + [0] * 200 + [5] * 40
    sums = exact_sums(costs)
    fills = Fills(sums, 80)
    assert fills.fill(10).complete
    assert fills.fill(9).heights == fill(sums.prefix, 9, 80)[0]
