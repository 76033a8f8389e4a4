from fractions import Fraction
from itertools import accumulate
from math import ceil
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockpartition import _certificate, _even, _fill, partition, verify
from blockpartition._even import bends, doubled_heights, near_string, taut_string

from . import instances, oracle
from .strategies import large_problems, problems


def squares(costs, found):
    return sum(load**2 for load in oracle.loads(costs, (0, *found.cuts, len(costs))))


@given(problems())
@example(([0, 0, 0, 603, 3], 4))
def test_exact_is_the_least_sum_of_squares_among_the_optima(problem):
    costs, k = problem
    found = partition(costs, k, even="exact")
    verify(found, costs)
    assert squares(costs, found) == oracle.least_squares(costs, k)


def test_exact_among_hundreds_of_drawn_problems():
    random = Random(1)
    for _ in range(6 * settings.default.max_examples):
        costs, k = instances.problem(random)
        found = partition(costs, k, even="exact")
        verify(found, costs)
        assert squares(costs, found) == oracle.least_squares(costs, k)


@given(large_problems())
def test_exact_is_never_less_even_than_quantile(problem):
    costs, k = problem
    exact, quantile = partition(costs, k, even="exact"), partition(costs, k)
    verify(exact, costs)
    assert squares(costs, exact) <= squares(costs, quantile)


@given(st.integers(1, 50), st.integers(0, 150))
def test_equal_layers_are_shared_out_evenly(k, more):
    n = k + more
    for even in ("quantile", "exact"):
        sizes = partition([7] * n, k, even=even).sizes
        assert max(sizes) - min(sizes) <= 1


def test_a_heavy_layer_does_not_bend_the_other_blocks():
    assert partition([100, 1, 1, 1, 1, 1, 1], 3).loads == (100, 3, 3)
    assert partition([1, 1, 1, 1, 1, 1, 100], 3).loads == (3, 3, 100)
    assert partition([1, 1, 1, 1, 100, 1, 1, 1, 1], 5, even="exact").loads == (2, 2, 100, 2, 2)


def numbered(heights):
    return dict(enumerate(heights))


@st.composite
def gate_lists(draw):
    """Rising gates such as the search makes: closed at both ends."""
    steps = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
    low = list(accumulate((rise for rise, _ in steps), initial=0))
    high = list(accumulate((rise for _, rise in steps), initial=0))
    gates = [(min(pair), max(pair)) for pair in zip(low, high, strict=True)]
    return [*gates[:-1], (gates[-1][1], gates[-1][1])]


@given(gate_lists())
def test_the_string_is_taut(gates):
    """It passes the gates, and no single point of it could move without making its two steps less even."""
    low, high = zip(*gates, strict=True)
    heights = list(map(Fraction, *taut_string(bends(numbered(low), numbered(high)))))
    assert len(heights) == len(gates)
    assert all(low <= height <= high for height, (low, high) in zip(heights, gates, strict=True))
    for i, (low, high) in enumerate(gates[1:-1], 1):
        assert heights[i] == min(max((heights[i - 1] + heights[i + 1]) / 2, low), high)


@given(gate_lists())
def test_the_string_is_the_one_found_by_looking_along_all_gates(gates):
    low, high = map(list, zip(*gates, strict=True))
    assert list(map(Fraction, *taut_string(bends(numbered(low), numbered(high))))) == oracle.taut_string(low, high)


@given(gate_lists())
def test_doubled_heights_are_those_of_the_string_rounded_up(gates):
    turns = bends(*map(numbered, zip(*gates, strict=True)))
    assert doubled_heights(turns) == [ceil(2 * height) for height in map(Fraction, *taut_string(turns))]


@given(gate_lists(), st.integers(1, 4))
def test_a_string_through_some_gates_is_the_string_through_those_alone(gates, every):
    low, high = map(list, zip(*gates, strict=True))
    chosen = [*range(0, len(gates) - 1, every), len(gates) - 1]
    turns = bends(*({i: heights[i] for i in chosen} for heights in (low, high)))
    assert all(at in chosen and low[at] <= height <= high[at] for at, height in turns)
    heights = list(map(Fraction, *taut_string(turns)))
    assert len(heights) == len(gates)
    for before, i, after in zip(chosen, chosen[1:], chosen[2:], strict=False):
        straight = heights[before] + (heights[after] - heights[before]) * Fraction(i - before, after - before)
        assert heights[i] == min(max(straight, low[i]), high[i])


@given(large_problems(), st.integers(1, 5))
def test_the_string_may_miss_gates_and_the_blocks_are_optimal_still(problem, gates):
    costs, k = problem
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_even, "_MOST_GATES", gates)
        verify(partition(costs, k), costs, partitions=k)


@pytest.fixture(params=[1, 4, 64])
def filled(request):
    """Blocks are taken as they are filled, also where they are few."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_even, "_MOST_GATES", 2)
        patched.setattr(_even, "_TAIL", request.param)
        yield


@pytest.mark.usefixtures("filled")
@given(large_problems())
@example(([0] * 20 + [1] * 12, 12))
@example(([1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1], 8))
def test_blocks_taken_as_they_are_filled_are_optimal(problem):
    costs, k = problem
    verify(partition(costs, k), costs, partitions=k)


@pytest.mark.parametrize("share", [2, 5, 10, 20])
@pytest.mark.parametrize("draw", [lambda random: random.randrange(1, 1000), Random.random], ids=["ints", "floats"])
def test_blocks_taken_as_they_are_filled_are_about_as_even(share, draw):
    """Layers do not come out even: loads differ by about a layer close to the string too."""
    random = Random(share)
    costs = [draw(random) for _ in range(20_000)]
    k = len(costs) // share
    mean, spreads = sum(costs) / k, []
    for gates in (10**9, 2):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_even, "_MOST_GATES", gates)
            found = partition(costs, k)
        spreads.append(sum((load - mean) ** 2 for load in found.loads))
    near, filled = spreads
    assert near != filled < 1.5 * near


@pytest.mark.parametrize(("n", "k"), [(2990, 1000), (4995, 1000), (5000, 1000)])
def test_what_filled_blocks_leave_over_is_spread_among_the_last(n, k):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_even, "_MOST_GATES", 2)
        sizes = partition([7] * n, k).sizes
    assert max(sizes) - min(sizes) <= 1


@given(large_problems())
def test_short_and_long_blocks_are_filled_alike(problem):
    """Once by looking at each layer, once by bisection."""
    costs, k = problem
    found = []
    for short in (0, 10**9):
        with pytest.MonkeyPatch.context() as patched:
            for module in (_certificate, _even, _fill):
                patched.setattr(module, "_SHORT", short)
            found.append(partition(costs, k))
    assert found[0] == found[1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 60), st.integers(1, 4), st.data())
def test_a_cut_is_the_nearest_to_its_target_and_of_two_the_earlier(costs, target, parts, data):
    prefix = list(accumulate(costs, initial=0))
    low, high = sorted(prefix[end] for end in data.draw(st.tuples(*[st.integers(1, len(costs))] * 2)))
    distances = {
        end: abs(parts * height - target) for end, height in enumerate(prefix) if end and low <= height <= high
    }
    beyond = 2 * high + 1
    doubled = [2 * height for height in [*prefix, beyond]]
    goals = [0, -(-2 * target // parts), 2 * beyond]
    found = near_string(doubled, 2 * high, [0, 2 * low, 2 * beyond], goals)[1]
    assert distances[found] == min(distances.values())
    if prefix[found] != high:  # behind the target, layers of zero are left to the next block
        assert found == min(distances, key=distances.__getitem__)


def test_halfway_between_two_cuts_the_earlier_is_taken():
    assert partition([1, 1, 1], 2).sizes == (1, 2)
    assert partition([2, 2, 2, 2, 2], 2).sizes == (2, 3)
