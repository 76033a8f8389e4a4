from fractions import Fraction

import pytest
from hypothesis import example, given

from blockpartition import partition, solve, verify

from . import oracle
from .strategies import problems


def bottleneck(blocks):
    return max(sum(map(Fraction, block)) for block in blocks)


@given(problems())
def test_no_partition_is_better(problem):
    costs, k = problem
    blocks = solve(costs, k)
    assert bottleneck(blocks) == oracle.least_bottleneck(costs, k)


@given(problems())
def test_blocks_are_the_sequence_cut_into_non_empty_pieces(problem):
    costs, k = problem
    blocks = solve(costs, k)
    assert len(blocks) == k
    assert all(blocks)
    assert [x for block in blocks for x in block] == costs


@given(problems())
def test_partition_agrees_with_solve_and_proves_itself(problem):
    costs, k = problem
    found = partition(costs, k)
    assert found.apply(costs) == solve(costs, k)
    verify(found, costs)


@given(problems())
@example(([0, 0, 0, 603, 3], 4))
def test_exact_is_the_least_sum_of_squares_among_the_optima(problem):
    costs, k = problem
    found = partition(costs, k, even="exact")
    verify(found, costs)
    assert sum(load**2 for load in oracle.loads(costs, (0, *found.cuts, len(costs)))) == oracle.least_squares(costs, k)


def test_examples():
    assert solve([1, 2, 3, 4, 5, 6], 2) == [[1, 2, 3, 4], [5, 6]]
    assert solve([1, 2, 3, 4, 5, 6], 3) == [[1, 2, 3], [4, 5], [6]]
    assert solve([5, 5, 5]) == [[5, 5, 5]]


@pytest.mark.parametrize(
    ("costs", "k"),
    [
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
    ],
)
@pytest.mark.timeout(5)
@pytest.mark.parametrize("even", ["quantile", "exact"])
def test_known_traps_of_heuristics(costs, k, even):
    found = partition(costs, k, even=even)
    verify(found, costs)
    assert len(found.sizes) == k
