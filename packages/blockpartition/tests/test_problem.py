from hypothesis import assume, example, given
from hypothesis import strategies as st

from blockpartition import Infeasible, Stage
from blockpartition._model import read_model

from .strategies import Placing, placings


@given(placings(), st.integers(0, 60))
@example(Placing([0, 1], [Stage(), Stage()], {"transfer": [1], "overlap": True}), 0)
def test_the_furthest_start_is_the_first_from_which_a_block_keeps_all_limits(problem, limit):
    try:
        problem = read_model(*problem.all, **problem.constraints).problem
    except Infeasible:
        assume(False)
    for slot in problem.slots:
        exact = not slot.need.entry and not slot.work.entry
        for end in range(1, problem.n + 1):
            first = problem.first_start(end, slot, limit)
            for start in range(end):
                fits = start >= problem.last_pin[end] and slot.fits(start, end)
                keeps = fits and problem.occupied(start, end, slot) <= limit
                assert keeps == (start >= first) if exact else start >= first or not keeps
