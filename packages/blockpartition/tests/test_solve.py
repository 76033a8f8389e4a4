from fractions import Fraction

from hypothesis import example, given, settings

from blockpartition import partition, solve, verify

from . import oracle
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
@example(([2] * 32 + [1] * 4000, 16))
@example(([5e-324, 1.7976931348623157e308] * 100, 7))
def test_partition_agrees_with_solve_and_proves_itself(problem):
    items, k = problem
    found = partition(items, k)
    assert found.apply(items) == solve(items, k)
    verify(found, items)


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
