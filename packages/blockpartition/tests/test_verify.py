from dataclasses import fields, replace
from itertools import accumulate, combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import Partition, Placement, Stage, partition, place, verify

from . import oracle
from .strategies import ODDITIES, placings, problems


def accepted(found: Partition | Placement, costs, stages=None, **constraints) -> bool:
    try:
        verify(found, costs, stages, **constraints)
    except ValueError:
        return False
    return True


def truthful(costs, ends, witness) -> Partition:
    """Return a partition with these ends whose fields are all true, except for the claim its witness proves."""
    placed = place(costs, len(ends) - 1, pin=ends[1:-1])
    return Partition(placed.sizes, placed.loads, placed.bottleneck, placed.lower_bound, placed.imbalance, witness)


@given(problems(max_size=6), st.data())
def test_no_witness_proves_a_worse_partition(problem, data):
    """One unit above the optimum is already rejected, and every optimum has a witness."""
    costs, k = problem
    ends = data.draw(st.sampled_from(list(oracle.all_ends(len(costs), k))))
    best = max(oracle.loads(costs, ends)) == oracle.least_bottleneck(costs, k)
    witnesses = list(combinations_with_replacement(range(len(costs)), k))
    assert any(accepted(truthful(costs, ends, witness), costs) for witness in witnesses) == best


@given(problems(max_size=6), st.sampled_from([field.name for field in fields(Partition)]), ODDITIES)
def test_no_field_can_be_forged(problem, name, value):
    """For any value of a field, verify returns only if it is true, and raises only the documented errors."""
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
        with pytest.raises(ValueError, match=rf"^expected {other} blocks, got {k}$"):
            verify(found, costs, stages, partitions=other)


GOOD = partition([1, 2, 3, 4, 5, 6], 3)


def test_what_is_no_partition_is_named():
    with pytest.raises(TypeError, match=r"^partition must be a Partition, got \[\[1\], \[2\]\] of type list$"):
        verify([[1], [2]], [1, 2])


def test_verify_requires_arguments_of_the_result():
    with pytest.raises(TypeError, match=r"^a plain partition has no stages"):
        verify(GOOD, [1, 2, 3, 4, 5, 6], 3)
    with pytest.raises(TypeError, match=r"^a plain partition has no stages"):
        verify(GOOD, [1, 2, 3, 4, 5, 6], pin=[1])
    with pytest.raises(TypeError, match=r"stages is missing$"):
        verify(place([1, 2], 2), [1, 2])


@given(placings(max_layers=6), st.sampled_from(["bottleneck", "makespan"]), st.data())
def test_an_accepted_placement_is_optimal(problem, objective, data):
    """Pieces of different placements, each of them correct, do not combine into a proof."""
    n, k = len(problem.costs), len(problem.stages)
    ends = data.draw(st.sampled_from(list(oracle.all_ends(n, k))))
    best = problem.placed(objective=objective)
    other = problem.placed(objective=objective, pin=list(ends[1:-1]), forbid=[])
    if best is None or other is None:
        return
    allowed = not set(problem.constraints["forbid"]) & set(ends) and set(problem.constraints["pin"]) <= set(ends)
    other = replace(other, lower_bound=best.lower_bound)  # that depends on the constraints
    if allowed and not isinstance(getattr(best, objective), float):  # equal floats may stand for unlike sums
        as_good = getattr(other, objective) == getattr(best, objective)
        assert accepted(other, problem.costs, problem.stages, objective=objective, **problem.constraints) == as_good
    elif accepted(other, problem.costs, problem.stages, objective=objective, **problem.constraints):
        outcomes = list(oracle.outcomes(problem.costs, problem.stages, **problem.constraints))
        m = problem.constraints["microbatches"]
        if objective == "bottleneck":
            assert oracle.agrees(other.bottleneck, min(map(max, outcomes)))
        else:
            assert oracle.agrees(other.makespan, min(oracle.makespan(times, m) for times in outcomes))


@given(placings(max_layers=6))
def test_what_does_not_fit_is_refused(problem):
    """However fast it would be, it is rejected."""
    roomy = replace(problem, stages=[replace(stage, capacity=None) for stage in problem.stages])
    found = roomy.placed()
    if found is not None and accepted(found, problem.costs, problem.stages, **problem.constraints):
        assert problem.placed().bottleneck == found.bottleneck


@given(
    placings(max_layers=5),
    st.sampled_from([field.name for field in fields(Placement)]),
    st.sampled_from(["bottleneck", "makespan"]),
    ODDITIES,
)
def test_no_field_of_a_placement_can_be_forged(problem, name, objective, value):
    """For any value of a field, verify returns only if it is true, and raises only the documented errors."""
    honest = problem.placed(objective=objective)
    if honest is None:
        return
    forged = replace(honest, **{name: value})
    try:
        verify(forged, problem.costs, problem.stages, objective=objective, gap=1, **problem.constraints)
    except (TypeError, ValueError):
        return
    if name == "sizes":  # an equally good placement with the same description
        assert sum(forged.sizes) == len(problem.costs)
    elif name == "gap":  # promising less than is proven is true as well
        assert objective == "makespan" or value == 0
        assert 0 <= value <= 1
    elif name != "witness":
        assert value == getattr(honest, name)


def test_a_pinned_cut_is_missed():
    with pytest.raises(ValueError, match=r"^cut 2 is pinned, but a block crosses it$"):
        verify(place([3, 1, 2], 2), [3, 1, 2], 2, pin=[2])


def test_verify_rejects_gap_above_requested():
    costs = [(7 * i * i) % 23 + 1 for i in range(20)]
    transfer = [(13 * i * i) % 19 for i in range(20)]
    call = {"stages": [Stage(1), Stage(2), Stage(1), Stage(3)], "transfer": transfer, "microbatches": 4}
    found = place(costs, **call, objective="makespan", gap=0.2)
    assert 0 < found.gap <= 0.2
    verify(found, costs, **call, objective="makespan", gap=0.2)
    with pytest.raises(ValueError, match=r"^gap is .*, more than 0$"):
        verify(found, costs, **call, objective="makespan")
    worse = place(costs, **call, pin=[17, 18, 19])
    for gap in (0.0, 0.2):
        with pytest.raises(ValueError, match=r"^blocks that finish earlier are possible"):
            verify(replace(worse, gap=gap), costs, **call, objective="makespan", gap=0.2)
