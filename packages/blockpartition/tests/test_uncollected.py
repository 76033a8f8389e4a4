import gc

import pytest

from blockpartition import solve
from blockpartition._uncollected import uncollected


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collecting(request):
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_collections_pause_inside_and_go_on_as_before(collecting):
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() == collecting


def test_also_after_an_error(collecting):
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled() == collecting


def test_solving_leaves_the_collector_as_it_was(collecting):
    solve(range(100), 50)
    assert gc.isenabled() == collecting
