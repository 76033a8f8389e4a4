from hypothesis import assume, example, given

from blockpartition import Infeasible, Stage
from blockpartition._bottleneck import _trace, least_slowest, slowest
from blockpartition._model import read_model
from blockpartition._problem import Bound
from blockpartition._reach import Reach

from .strategies import Placing, placings


@given(placings())
@example(Placing([10] * 6, [Stage(1000), Stage(), Stage(1000)], {}))
@example(Placing([1, 1, 1], [Stage(capacity=1)] * 3, {"boundary": [0, 1, 1]}))
def test_blocks_are_found_where_only_the_least_bound_allows_them(problem):
    try:
        problem = read_model(*problem.all, **problem.constraints).problem
    except Infeasible:
        assume(False)
    found = least_slowest(problem)
    if found is None:
        return
    blocks = _trace(Reach(problem, Bound(found[0])))
    assert [block.start for block in blocks] == [0, *(block.end for block in blocks[:-1])]
    assert all(block.start < block.end for block in blocks)
    assert blocks[-1].end == problem.n
    assert all(block.slot.fits(block.start, block.end) for block in blocks)
    assert slowest(problem, blocks) == found[0]
