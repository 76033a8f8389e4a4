from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import example, given, settings

from blockpartition import _search, partition, solve, verify
from blockpartition._numbers import read

from . import oracle
from .cases import cases
from .strategies import large_problems, problems


def bottleneck(items, k):
    return max(oracle.total(block) for block in solve(items, k))


@settings(max_examples=8 * settings.default.max_examples)
@given(problems())
def test_no_partition_is_better(problem):
    items, k = problem
    assert bottleneck(items, k) == oracle.least_bottleneck(items, k)
    verify(partition(items, k), items)


@given(problems() | large_problems())
@example(([0.0, 0.5, 0.5, 1.0, 0.5], 2))
def test_the_search_takes_few_passes(problem):
    """Floats are ints of up to two thousand bits to it: it must not go from one to the next."""
    costs, k = problem
    passes, filled = 0, _search.filled

    def counted(*arguments):
        nonlocal passes
        passes += 1
        assert passes <= limit
        return filled(*arguments)

    units = read(costs).units
    limit = 2 * sum(units).bit_length() + 12
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_search, "filled", counted)
        _search.least_bottleneck(list(accumulate(units, initial=0)), max(units), k)


@given(problems() | large_problems())
def test_partition_agrees_with_solve_and_proves_itself(problem):
    items, k = problem
    found = partition(items, k)
    assert found.apply(items) == solve(items, k)
    verify(found, items)


TRAPS = [
    ([9, 9, 15, 8, 9, 6, 5], 2),
    ([3, 3, 3, 3, 7, 7], 5),
    ([5, 5, 5, 9, 9], 4),
    ([2, 2, 3, 3], 3),
    ([100] * 23, 8),
    ([100] * 127, 64),
    ([2] * 32 + [1] * 4000, 16),
    ([0, 0, 0, 603, 3], 4),
    ([12, 12, 350] * 3, 6),
    ([350, 12, 12] * 8, 16),
    ([4198400, 0, 0] * 8, 16),
]


@cases("even", ["quantile", "exact"])
@cases(("items", "k"), TRAPS)
def test_known_traps_of_heuristics(items, k, even):
    found = partition(items, k, even=even)
    verify(found, items)
    assert len(found.sizes) == k


def test_numbers_from_all_over_the_range_of_floats_end_the_search():
    items = [5e-324, 1.7976931348623157e308] * 100
    for k in (1, 7, 100, 200):
        verify(partition(items, k), items)


@given(problems())
@example(([0, 0, 0, 603, 3], 4))
def test_result_describes_itself(problem):
    items, k = problem
    found = partition(items, k)
    loads = oracle.loads(items, (0, *found.cuts, len(items)))
    assert all(map(oracle.agrees, found.loads, loads))
    assert oracle.agrees(found.bottleneck, max(loads))
    assert oracle.agrees(found.lower_bound, max(oracle.total(items) / k, *map(Fraction, items)))
    mean = oracle.total(items) / k
    assert found.imbalance == (float(max(loads) / mean) if mean else 1.0)
    assert found.gap == 0
