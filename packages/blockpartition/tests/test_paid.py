from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from blockpartition._measure import Measure
from blockpartition._paid import read_paid


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8), st.booleans(), st.data())
def test_ends_within_reach_and_what_those_beyond_ask_for(layers, overlap, data):
    """Each position looked at by itself: the cost of the cut there, and the work up to it if they add up."""
    work = Measure(list(accumulate((cost for cost, _ in layers), initial=0)))
    extra = [0, *(cut for _, cut in layers)]
    paid = read_paid(work, extra, overlap)
    start = data.draw(st.integers(0, len(layers) - 1))
    limit = data.draw(st.integers(0, 30))
    asked = [cut if overlap else work.prefix[i] + cut - work.prefix[start] for i, cut in enumerate(extra)]
    assert paid.sure_end(start, limit) == next((i for i, each in enumerate(asked) if each > limit), len(asked)) - 1

    end = data.draw(st.integers(start, len(layers) - 1))
    beyond = [max(work.of(start, i), asked[i]) if overlap else asked[i] for i in range(end + 1, len(extra))]
    least = paid.least_beyond(start, end)
    assert least == work.of(start, end + 1) <= min(beyond) if overlap else least == min(beyond)

    alone = [max(cost, cut) if overlap else cost + cut for cost, cut in layers]
    assert paid.singles.above(limit) == sorted(
        (i for i, each in enumerate(alone) if each > limit), key=lambda i: (alone[i], i)
    )
