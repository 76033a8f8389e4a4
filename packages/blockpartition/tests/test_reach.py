from itertools import pairwise

from hypothesis import assume, example, given
from hypothesis import strategies as st

from blockpartition import Infeasible, Stage
from blockpartition._bottleneck import least_slowest
from blockpartition._model import read_model
from blockpartition._problem import Bound
from blockpartition._reach import Hopeful, Reach, _runs, _union

from .cases import cases
from .strategies import Placing, placings

INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)).map(lambda x: (x[0], x[0] + x[1])), max_size=6)


def positions(intervals):
    return {position for first, last in intervals for position in range(first, last + 1)}


@given(INTERVALS, st.integers(0, 26))
@example([(0, 2), (3, 5)], 26)
def test_a_union_is_what_lies_in_any_in_as_few_intervals_as_possible(intervals, limit):
    merged = _union(intervals, limit)
    assert positions(merged) == {position for position in positions(intervals) if position <= limit}
    assert all(first <= last for first, last in merged)
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(merged))


@given(INTERVALS, st.sets(st.integers(0, 26)))
def test_runs_are_all_but_the_excluded_positions(intervals, excluded):
    starts = _union(intervals, 26)
    runs = list(_runs(starts, sorted(excluded)))
    assert positions(runs) == positions(starts) - excluded
    assert all(first <= last for first, last in runs)


@cases("kind", [Reach, Hopeful])
@given(placings(), st.integers(0, 16))
@example(Placing([3, 1, 3], [Stage(2), Stage(1, capacity=5)], {"boundary": [0, 1, 9]}), 15)
def test_a_bound_too_low_names_one_that_is_no_more_than_the_least(kind, problem, sixteenths):
    """So the search comes closer, and never too far."""
    try:
        model = read_model(*problem.all, **problem.constraints)
    except Infeasible:
        assume(False)
    found = least_slowest(model.problem)
    if found is None or found[0] == 0:
        return
    bound = found[0] * sixteenths / 17
    reach = kind(model.problem, Bound(bound))
    assert not reach.complete
    assert bound < reach.next_bound <= found[0]
