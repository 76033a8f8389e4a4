from dataclasses import fields, replace
from itertools import accumulate, combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import Partition, partition, place, verify

from . import oracle
from .strategies import ODDITIES, problems


def truthful(costs, ends, witness) -> Partition:
    """A partition with these ends that says nothing untrue about itself, but for what the witness proves."""
    placed = place(costs, len(ends) - 1, pin=ends[1:-1])
    return Partition(placed.sizes, placed.loads, placed.bottleneck, placed.lower_bound, placed.imbalance, witness)


@given(problems(max_size=6), st.data())
def test_no_witness_proves_a_worse_partition(problem, data):
    """Not even where it is worse by one unit; and one of them proves each of the best."""
    costs, k = problem
    ends = data.draw(st.sampled_from(list(oracle.all_ends(len(costs), k))))
    best = max(oracle.loads(costs, ends)) == oracle.least_bottleneck(costs, k)
    witnesses = list(combinations_with_replacement(range(len(costs)), k))
    assert any(accepted(truthful(costs, ends, witness), costs) for witness in witnesses) == best


def accepted(found: Partition, costs) -> bool:
    try:
        verify(found, costs)
    except ValueError:
        return False
    return True


@given(problems(max_size=6), st.sampled_from([field.name for field in fields(Partition)]), ODDITIES)
def test_no_field_can_be_forged(problem, name, value):
    """Whatever stands in a field: verify returns only if the field is true, and raises nothing unforeseen."""
    costs, k = problem
    honest = partition(costs, k)
    forged = replace(honest, **{name: value})
    try:
        verify(forged, costs)
    except (TypeError, ValueError):
        return
    if name == "sizes":
        assert max(oracle.loads(costs, (0, *accumulate(value)))) == oracle.least_bottleneck(costs, k)
    elif name != "witness":  # there may be many proofs
        assert value == getattr(honest, name)


@given(problems(min_size=2), st.data())
def test_as_many_blocks_as_were_asked_for(problem, data):
    costs, k = problem
    other = data.draw(st.integers(1, len(costs)).filter(lambda count: count != k))
    for found, stages in ((partition(costs, k), None), (place(costs, k), k)):
        verify(found, costs, stages, partitions=k)
        with pytest.raises(ValueError, match=rf"^the number of blocks is {k}, {other} were asked for$"):
            verify(found, costs, stages, partitions=other)


GOOD = partition([1, 2, 3, 4, 5, 6], 3)


def test_what_is_no_partition_is_named():
    with pytest.raises(TypeError, match=r"^partition must be a Partition, got \[\[1\], \[2\]\] of type list$"):
        verify([[1], [2]], [1, 2])


def test_each_result_is_verified_with_the_arguments_it_came_from():
    with pytest.raises(TypeError, match=r"^a plain partition knows no stages"):
        verify(GOOD, [1, 2, 3, 4, 5, 6], 3)
    with pytest.raises(TypeError, match=r"^a plain partition knows no stages"):
        verify(GOOD, [1, 2, 3, 4, 5, 6], pin=[1])
    with pytest.raises(TypeError, match=r"stages is missing$"):
        verify(place([1, 2], 2), [1, 2])
