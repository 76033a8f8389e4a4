from fractions import Fraction
from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockpartition import _refill, _rounded, _solve, partition, solve, verify
from blockpartition._even import near_even
from blockpartition._exact import least_bottleneck
from blockpartition._rounded import _close_beyond, is_least, is_witness, largest_sum
from blockpartition._sums import exact_sum, quick_sums

from . import instances, oracle
from .strategies import CLOSE_FLOATS, FLOATS, INTS

KINDS = [CLOSE_FLOATS, FLOATS, INTS, st.floats(0, 1), st.just(0.1), st.sampled_from([0.1, 0.2, 0.3])]


@pytest.fixture(autouse=True)
def _always_quick():
    """Also where ints would be as quick, and where the whole problem is soon solved anew."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_solve, "_MANY", 0)
        patched.setattr(_solve, "_LONG", 10**9)
        patched.setattr(_refill, "_FEW", -1)
        yield


@st.composite
def rounded_problems(draw, max_size=80):
    costs = draw(st.lists(draw(st.sampled_from(KINDS)), min_size=1, max_size=max_size))
    return costs, draw(st.integers(1, len(costs)))


def exactly(costs, k):
    """The same without any float."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_solve, "_MANY", 10**9)
        return partition(costs, k)


@given(rounded_problems())
def test_what_rounded_sums_find_is_what_exact_sums_find(problem):
    costs, k = problem
    found, expected = partition(costs, k), exactly(costs, k)
    for name in ("bottleneck", "lower_bound", "imbalance"):
        assert getattr(found, name) == getattr(expected, name)
        assert type(getattr(found, name)) is type(getattr(expected, name))
    assert list(map(type, found.loads)) == list(map(type, expected.loads))
    verify(found, costs, partitions=k)
    sums = quick_sums(costs)
    if sums is not None and sums.error == 0:
        assert found == expected


@given(rounded_problems())
def test_the_blocks_are_optimal(problem):
    costs, k = problem
    blocks = solve(costs, k)
    assert [x for block in blocks for x in block] == costs
    assert len(blocks) == k
    assert all(blocks)
    loads = oracle.loads(costs, tuple(accumulate(map(len, blocks), initial=0)))
    assert max(loads) == max(oracle.loads(costs, tuple(accumulate(exactly(costs, k).sizes, initial=0))))


def test_thousands_of_drawn_problems():
    random = Random(2)
    for _ in range(10 * settings.default.max_examples):
        costs, k = instances.problem(random)
        least = oracle.least_bottleneck(costs, k)
        assert max(oracle.total(block) for block in solve(costs, k)) == least
        verify(partition(costs, k), costs)


@given(rounded_problems(12), st.data())
def test_only_an_optimum_passes_for_one(problem, data):
    """Also where the blocks are not those that were found."""
    costs, k = problem
    sums = quick_sums(costs)
    if sums is None or sums.error == 0:
        return
    bottleneck, _ = least_bottleneck(sums, k)
    cuts = data.draw(st.sets(st.integers(1, max(1, len(costs) - 1)), min_size=k - 1, max_size=k - 1)) if k > 1 else ()
    ends = [0, *sorted(cuts), len(costs)]
    largest = max(oracle.loads(costs, tuple(ends)))
    if is_least(costs, sums, bottleneck, largest):
        assert largest == exactly(costs, k).bottleneck or largest == oracle.least_bottleneck(costs, k)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(9, 40), st.integers(0, 9))
@example([3, 9], 9, 3)
def test_blocks_that_are_close_are_all_found(costs, bound, reach):
    heights = list(accumulate(costs, initial=0))
    start, close = 0, []
    for i, height in enumerate(heights):
        if height > heights[start] + bound:
            if height <= heights[start] + bound + reach:
                close.append((heights[start], height))
            start = i - 1
    assert _close_beyond(heights, bound, reach) == close


@given(rounded_problems())
def test_the_largest_of_blocks_is_the_exact_one(problem):
    costs, k = problem
    sums = quick_sums(costs)
    if sums is None or sums.error == 0:
        return
    bottleneck, heights = least_bottleneck(sums, k)
    ends = near_even(sums, bottleneck, heights)
    largest = largest_sum(costs, sums, bottleneck, ends)
    if sums.length(max(sums.prefix[b] - sums.prefix[a] for a, b in pairwise(ends))) == bottleneck:
        assert largest in (None, max(oracle.loads(costs, tuple(ends))))


@given(rounded_problems(12), st.data())
def test_a_witness_is_one_for_exact_sums_too(problem, data):
    costs, k = problem
    sums = quick_sums(costs)
    if sums is None:
        return
    witness = tuple(sorted(data.draw(st.lists(st.integers(0, len(costs)), min_size=k, max_size=k))))
    bottleneck, _ = least_bottleneck(sums, k)
    largest = Fraction(bottleneck) * Fraction(sums.unit)
    starts_and_ends = list(pairwise((0, *witness)))
    closed = witness[-1] < len(costs) and all(
        sums.prefix[end + 1] - sums.prefix[start] >= bottleneck * sums.unit for start, end in starts_and_ends
    )
    if closed and is_witness(costs, sums, witness, bottleneck, largest):
        assert all(oracle.total(costs[start : end + 1]) >= largest for start, end in starts_and_ends)


def test_one_heavy_layer_takes_no_exact_solver():
    """The witness ends before it again and again."""
    random = Random(0)
    costs = [random.random(), 50.0, *(random.random() for _ in range(3000))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_solve, "_exactly", None)
        found = partition(costs, 1000)
    assert found.bottleneck == 50
    verify(found, costs, partitions=1000)


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("heaviest", [1000, 10_000_000])
def test_costs_in_no_order_take_no_exact_solver(kind, heaviest):
    """Neither where blocks decide nor where one layer does, which is then all that is looked at exactly."""
    random = Random(1)
    costs = [*(kind(1000 * random.random()) for _ in range(3000)), kind(heaviest)]
    for call in (solve, partition):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_solve, "read", None)
            call(costs, 500)


def test_few_sums_are_added_up_exactly():
    """Of those that are equal, or nearly, none: the exact solver is quicker then."""
    costs = [0.1, 0.2, 0.3, 0.1] * 1000
    added = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_rounded, "exact_sum", lambda costs: added.append(costs) or exact_sum(costs))
        solve(costs, 2000)
        partition(costs, 2000)
    assert len(added) < 300


def test_many_sums_that_are_equal_are_left_to_the_exact_solver():
    costs = [0.1, 0.2, 0.3, 0.1] * 100
    assert partition(costs, 200) == exactly(costs, 200)
    assert partition([0.1] * 1000, 500) == exactly([0.1] * 1000, 500)
