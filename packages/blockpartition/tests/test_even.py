from fractions import Fraction
from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import example, given

from blockpartition import partition, verify

from . import oracle
from .counting import steps
from .strategies import large_problems, problems


def squares(costs, found):
    return sum(load**2 for load in oracle.loads(costs, (0, *found.cuts, len(costs))))


@given(problems())
@example(([0, 0, 0, 603, 3], 4))
def test_exact_minimizes_sum_of_squares(problem):
    costs, k = problem
    found = partition(costs, k, even="exact")
    verify(found, costs)
    assert squares(costs, found) == oracle.least_squares(costs, k)


@given(large_problems())
def test_exact_is_never_less_even_than_quantile(problem):
    costs, k = problem
    exact, quantile = partition(costs, k, even="exact"), partition(costs, k)
    verify(exact, costs)
    assert squares(costs, exact) <= squares(costs, quantile)


@given(large_problems())
def test_each_end_is_nearest_to_its_quantile(problem):
    """Moving a single end either brings it no nearer to its quantile, or exceeds the bottleneck."""
    costs, k = problem
    found = partition(costs, k)
    sums = list(accumulate(map(Fraction, costs), initial=Fraction(0)))
    ends = [0, *found.cuts, len(costs)]
    bottleneck = max(sums[end] - sums[start] for start, end in pairwise(ends))
    for j in range(1, k):
        goal = sums[-1] * j / k
        for other in (ends[j] - 1, ends[j] + 1):
            if ends[j - 1] < other < ends[j + 1] and abs(sums[other] - goal) < abs(sums[ends[j]] - goal):
                assert max(sums[other] - sums[ends[j - 1]], sums[ends[j + 1]] - sums[other]) > bottleneck


@pytest.mark.parametrize("k", [5, 50, 500, 1500])
def test_exact_takes_linear_time_on_any_sequence(k):
    """The cases include layers larger than the mean block, and blocks that could hold many layers."""
    random = Random(k)
    for costs in (
        [random.lognormvariate(0, 3) for _ in range(2000)],
        [*(random.randrange(9) for _ in range(1999)), 10**5],
    ):
        assert steps(partition, costs, k, even="exact") < 1000 * len(costs)
