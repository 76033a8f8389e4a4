from fractions import Fraction

from hypothesis import example, given, settings

from blockpartition import partition, solve, verify

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
    *(([5e-324, 1.7976931348623157e308] * 100, k) for k in (1, 7, 100, 200)),
]


@cases("even", ["quantile", "exact"])
@cases(("items", "k"), TRAPS)
def test_known_traps_of_heuristics(items, k, even):
    found = partition(items, k, even=even)
    verify(found, items)
    assert len(found.sizes) == k


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
