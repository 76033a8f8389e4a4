import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given

from blockpartition import partition, place

from .cases import cases
from .strategies import problems


@given(problems())
def test_apply_cuts_any_sequence_as_the_costs(problem):
    costs, k = problem
    found = partition(costs, k)
    names = [f"layer{i}" for i in range(len(costs))]
    blocks = found.apply(names)
    assert [len(block) for block in blocks] == list(found.sizes)
    assert [name for block in blocks for name in block] == names
    assert [names.index(block[0]) for block in blocks[1:]] == list(found.cuts)
    assert found.apply("".join("x" for _ in names)) == [["x"] * size for size in found.sizes]


@cases("length", [5, 7])
def test_apply_needs_as_many_items_as_layers(length):
    with pytest.raises(ValueError, match=rf"^the partition has 6 layers, but the sequence has {length} items$"):
        partition([1, 2, 3, 4, 5, 6], 3).apply(range(length))


@cases("found", [partition([1, 2, 3], 2), place([1, 2, 3], 2)])
def test_results_are_values(found):
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found
    assert len({found, copy.copy(found)}) == 1
    with pytest.raises(FrozenInstanceError):
        found.sizes = (1, 1, 1)
