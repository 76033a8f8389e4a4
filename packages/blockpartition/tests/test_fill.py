from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import _fill
from blockpartition._fill import fill, fill_back

from .cases import cases

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=30)


def greedy(costs, bound, blocks):
    """Heights of the ends of blocks filled from the left."""
    heights, height, start = [], 0, 0
    for cost in costs:
        if height + cost > start + bound:
            heights.append(height)
            start = height
        height += cost
    return (heights + [height] * blocks)[:blocks]


@pytest.fixture(params=[0, 10**9], ids=["bisected", "scanned"])
def way(request):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_fill, "_SHORT", request.param)
        yield


@pytest.mark.usefixtures("way")
class TestFill:
    @given(COSTS, st.data())
    def test_blocks_are_filled_from_the_left(self, costs, data):
        prefix = list(accumulate(costs, initial=0))
        blocks = data.draw(st.integers(1, len(costs)))
        bound = data.draw(st.integers(max(costs), sum(costs)))
        assert fill(prefix, bound, blocks)[0] == greedy(costs, bound, blocks)

    @given(COSTS, st.data())
    def test_no_bound_below_the_one_told_changes_anything(self, costs, data):
        prefix = list(accumulate(costs, initial=0))
        blocks = data.draw(st.integers(1, len(costs)))
        bound = data.draw(st.integers(max(costs), sum(costs)))
        heights, above, _ = fill(prefix, bound, blocks)
        assert above > bound
        if heights[-1] < prefix[-1]:
            assert greedy(costs, above - 1, blocks) == heights

    @given(COSTS, st.data())
    def test_from_the_right_it_is_the_mirror_image(self, costs, data):
        prefix = list(accumulate(costs, initial=0))
        blocks = data.draw(st.integers(1, len(costs)))
        bound = data.draw(st.integers(max(costs), sum(costs)))
        mirrored = greedy(costs[::-1], bound, blocks)
        assert fill_back(prefix, bound, blocks) == [sum(costs) - height for height in [0, *mirrored][::-1]]


@cases("blocks", [1, 2, 5])
def test_layers_of_zero_belong_to_the_block_before(blocks):
    prefix = list(accumulate([2, 0, 0, 2, 0], initial=0))
    heights, _, _ = fill(prefix, 2, blocks)
    assert heights == [2, 4, 4, 4, 4][:blocks]
    assert all(end - start <= 2 for start, end in pairwise([0, *heights]))
