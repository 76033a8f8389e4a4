from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import Partition, partition, place, verify

from . import oracle
from .cases import cases
from .strategies import problems


@given(problems(), st.data())
def test_a_worse_partition_has_no_proof(problem, data):
    """Whatever witness comes with it, drawn or left over from the optimum."""
    costs, k = problem
    best = partition(costs, k)
    ends = data.draw(st.sampled_from(list(oracle.all_ends(len(costs), k))))
    loads = oracle.loads(costs, ends)
    if max(loads) == oracle.least_bottleneck(costs, k):
        return
    worse = replace(
        partition(costs, k),
        sizes=tuple(end - start for start, end in pairwise(ends)),
        loads=tuple(loads),
        bottleneck=max(loads),
    )
    drawn = data.draw(st.lists(st.integers(0, len(costs)), min_size=k, max_size=k).map(sorted).map(tuple))
    for witness in (best.witness, drawn):
        with pytest.raises(ValueError, match=r"^(witness|loads|the bottleneck)"):
            verify(replace(worse, witness=witness), costs)


def accepted(found: Partition, costs) -> bool:
    try:
        verify(found, costs)
    except ValueError:
        return False
    return True


@given(problems(), st.data())
def test_an_accepted_partition_is_optimal(problem, data):
    costs, k = problem
    fields = ("sizes", "loads", "bottleneck", "lower_bound", "witness")
    other = partition(*data.draw(problems()))
    changed = {name: getattr(other, name) for name in data.draw(st.sets(st.sampled_from(fields), min_size=1))}
    found = replace(partition(costs, k), **changed)
    if accepted(found, costs):
        assert found.bottleneck == max(found.loads)
        assert max(oracle.loads(costs, (0, *found.cuts, len(costs)))) == oracle.least_bottleneck(
            costs, len(found.sizes)
        )


GOOD = partition([1, 2, 3, 4, 5, 6], 3)


@cases(
    ("change", "message"),
    [
        ({"sizes": (3, 3, 0)}, r"^sizes\[2\] is 0; every block needs at least one layer$"),
        ({"sizes": (3, 2, 2)}, r"^the sizes add up to 7 layers, there are 6 costs$"),
        ({"sizes": (2, 3, 1)}, r"^loads are \(3, 12, 6\), the partition says \(6, 9, 6\)$"),
        ({"loads": (6, 9, 7)}, r"^loads are \(6, 9, 6\), the partition says \(6, 9, 7\)$"),
        ({"bottleneck": 8}, r"^the bottleneck is 9, the partition says 8$"),
        ({"lower_bound": 8}, r"^the lower bound is 7, the partition says 8$"),
        ({"witness": (2, 4)}, r"^the witness has 2 ends for 3 blocks$"),
        ({"witness": (3, 4, 6)}, r"^witness\[2\] is 6; it has to lie in 4 … 5$"),
        ({"witness": (3, 2, 5)}, r"^witness\[1\] is 2; it has to lie in 3 … 5$"),
        ({"witness": (2, 4, 5)}, r"^witness\[0\] proves nothing: layers 0 … 2 together stay below the bottleneck$"),
    ],
)
def test_each_field_is_checked(change, message):
    with pytest.raises(ValueError, match=message):
        verify(replace(GOOD, **change), [1, 2, 3, 4, 5, 6])


def test_a_witness_of_a_plain_partition():
    assert GOOD.witness == (3, 4, 5)


def test_each_result_is_verified_with_the_arguments_it_came_from():
    with pytest.raises(TypeError, match=r"^a plain partition knows no stages"):
        verify(GOOD, [1, 2, 3, 4, 5, 6], 3)
    with pytest.raises(TypeError, match=r"^a plain partition knows no stages"):
        verify(GOOD, [1, 2, 3, 4, 5, 6], pin=[1])
    with pytest.raises(TypeError, match=r"stages is missing$"):
        verify(place([1, 2], 2), [1, 2])
    with pytest.raises(ValueError, match=r"^objective must be one of 'bottleneck', 'makespan', got 'speed'$"):
        verify(GOOD, [1, 2, 3, 4, 5, 6], objective="speed")


def test_proof_of_a_hundred_thousand_layers():
    random = Random(0)
    for costs in ([random.randrange(1000) for _ in range(100_000)], [random.random() for _ in range(100_000)]):
        for k in (2, 64, 1000):
            verify(partition(costs, k), costs)


@pytest.mark.long
@pytest.mark.timeout(1800)
@cases("n", [10**3, 10**4, 10**5, 10**6])
@cases("draw", ["randrange", "random", "pareto", "runs"])
def test_proof_of_large_partitions(n, draw):
    random = Random(n)
    costs = {
        "randrange": lambda: [random.randrange(1000) for _ in range(n)],
        "random": lambda: [random.random() for _ in range(n)],
        "pareto": lambda: [int(random.paretovariate(1.1)) for _ in range(n)],
        "runs": lambda: [x % 1000 for x in accumulate(random.randrange(2) for _ in range(n))],
    }[draw]()
    for k in (1, 2, 8, 64, 512, n // 2, n):
        verify(partition(costs, k), costs)
