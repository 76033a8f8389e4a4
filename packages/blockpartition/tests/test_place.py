"""Placement compared with brute force, and properties that hold for problems too large for it."""

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockpartition import Mode, Stage, partition, place, verify

from . import oracle
from .cases import cases
from .counting import steps
from .strategies import SMALL, Placing, placings


# The second layer is too heavy for the second stage, so the first must not stop before it: greedy would.
@settings(max_examples=3 * settings.default.max_examples)
@given(placings())
@example(Placing([1, 5, 1], [Stage(1, 5), Stage(1, 2)], {}))
@example(Placing([3, 1, 3], [Stage(1, 9), Stage(1, 2), Stage(1, 9)], {}))
@example(
    Placing([0, 7, 8, 1], [Stage(3), Stage(1), Stage(3)], {})
)  # 7 is too much for the second, unless all may take 7
def test_no_placement_is_faster(problem):
    outcomes = list(oracle.outcomes(problem.costs, problem.stages, **problem.constraints))
    found = problem.placed()
    assert (found is None) == (not outcomes)
    if found is not None:
        assert oracle.agrees(found.bottleneck, min(map(max, outcomes)))
        verify(found, problem.costs, problem.stages, **problem.constraints)


@settings(max_examples=3 * settings.default.max_examples)
@given(placings(), st.sampled_from([0, 0, 0.01, Fraction(1, 10), 1, 5]))
def test_no_placement_finishes_earlier_than_the_gap_allows(problem, gap):
    outcomes = list(oracle.outcomes(problem.costs, problem.stages, **problem.constraints))
    found = problem.placed(objective="makespan", gap=gap)
    assert (found is None) == (not outcomes)
    if found is None:
        return
    makespans = [oracle.makespan(times, problem.constraints["microbatches"]) for times in outcomes]
    assert any(oracle.agrees(found.makespan, each) for each in makespans)
    assert found.gap <= gap
    assert oracle.at_most(found.makespan, min(makespans) * (1 + Fraction(found.gap)))
    verify(found, problem.costs, problem.stages, objective="makespan", gap=gap, **problem.constraints)


@given(st.lists(SMALL, min_size=1, max_size=40), st.data())
def test_without_constraints_the_bottleneck_is_that_of_partition(costs, data):
    k = data.draw(st.integers(1, len(costs)))
    found, plain = place(costs, k), partition(costs, k)
    assert (found.bottleneck, found.lower_bound) == (plain.bottleneck, plain.lower_bound)
    assert found.imbalance == plain.imbalance
    assert (found.times, found.makespan) == (found.loads, None)
    assert place(costs, [Stage()] * k) == found


@given(placings(), st.sampled_from(["bottleneck", "makespan"]))
def test_the_result_describes_itself(problem, objective):
    found = problem.placed(objective=objective)
    if found is None:
        return
    costs, stages, constraints = problem.costs, problem.stages, problem.constraints
    n, ends = len(costs), [0, *found.cuts, len(costs)]
    loads = oracle.loads(costs, ends)
    assert not set(constraints["forbid"]) & set(found.cuts)
    assert set(constraints["pin"]) <= set(found.cuts)
    assert all(map(oracle.agrees, found.loads, loads))
    transfer = [*(constraints["transfer"] or [0] * n), 0][:n]
    times = []
    for j, (name, stage, end) in enumerate(zip(found.modes, stages, ends[1:], strict=True)):
        mode = {mode.name: mode for mode in stage.modes or [Mode("")]}[name or ""]
        assert (name is None) == (not stage.modes)
        compute = Fraction(mode.time) * oracle.total(costs[ends[j] : end]) / Fraction(stage.speed)
        sent = Fraction(transfer[end - 1]) if end < n else Fraction(0)
        times.append(compute + sent)
    assert all(map(oracle.agrees, found.times, times))
    assert found.bottleneck == max(found.times)
    assert found.lower_bound <= found.bottleneck
    speed = sum(Fraction(stage.speed) for stage in stages)
    mean = oracle.total(costs) / speed
    if any(stage.modes for stage in stages):
        return
    if not constraints["forbid"]:
        fastest = max(Fraction(stage.speed) for stage in stages)
        assert oracle.agrees(found.lower_bound, max(mean, max(map(Fraction, costs)) / fastest))
    assert oracle.agrees(found.imbalance, max(times) / mean if mean else 1)


def test_ties_are_cut_in_proportion_to_speeds():
    assert place([1] * 8 + [6], [Stage(1)] * 3).sizes == (4, 4, 1)
    assert place([1] * 9 + [100], [Stage(1), Stage(2), Stage(1)]).sizes == (3, 6, 1)


def test_large_placements_prove_themselves():
    n, random = 200, Random(200)
    costs, memory, transfer = ([random.randrange(1000) for _ in range(n)] for _ in range(3))
    k, room = n // 12, sum(memory) * 16 // n
    fast, slow = Stage(2, room + 1500), Stage(1, room + 1000)
    fixed = [random.choice([fast, slow]) for _ in range(k)]
    modes = [Mode("keep"), Mode("half", 1.2, 0.5), Mode("recompute", Fraction(4, 3), 0.25, 1)]
    kept = {"memory": memory, "activations": [size // 30 for size in transfer], "in_flight": "1f1b", "microbatches": 8}
    for stages, constraints in [
        ([replace(stage, modes=modes) for stage in fixed], kept),
        (fixed, {"memory": memory}),
        (fixed, {"memory": memory, "transfer": transfer}),
        (fixed, {"memory": memory, "forbid": [7, 9], "pin": [n // 2]}),
    ]:
        verify(place(costs, stages, **constraints), costs, stages, **constraints)


@given(st.lists(SMALL, min_size=1, max_size=20), st.data(), st.integers(1, 20))
def test_both_objectives_agree_for_equal_stages(costs, data, m):
    """The latency is the sum of all costs, wherever the cuts are."""
    k = data.draw(st.integers(1, len(costs)))
    found = place(costs, k, objective="makespan", microbatches=m)
    assert found.makespan == sum(map(Fraction, costs)) + (m - 1) * place(costs, k).bottleneck
    assert place(costs, 1, objective="makespan", microbatches=m, gap=1).gap == 0  # a gap below the limit is proven


KEEP = Mode("keep")
RECOMPUTE = Mode("recompute", time=Fraction(4, 3), saved=0.25, transient=1)


def test_only_stages_short_of_memory_recompute():
    """1F1B: the first stage holds four micro-batches, the last one."""
    stages = [Stage(capacity=10, modes=[KEEP, RECOMPUTE])] * 4
    found = place([3] * 8, stages, activations=[2] * 8, in_flight="1f1b")
    assert (found.sizes, found.modes) == ((2, 2, 2, 2), ("recompute", "recompute", "keep", "keep"))
    assert found.times == (8, 8, 6, 6)
    verify(found, [3] * 8, stages, activations=[2] * 8, in_flight="1f1b")


def test_first_of_equally_good_modes_is_chosen():
    for modes in ([Mode("a"), Mode("b")], [Mode("b"), Mode("a")]):
        assert place([1, 1], [Stage(modes=modes)] * 2).modes == (modes[0].name,) * 2


def test_impossible_modes_are_named():
    with pytest.raises(TypeError, match=r"^modes\[1\] must be a Mode, got 'b' of type str$"):
        Stage(modes=[KEEP, "b"])
    with pytest.raises(ValueError, match=r"^a stage's modes must have different names"):
        Stage(modes=[KEEP, Mode("keep", 2)])
    with pytest.raises(ValueError, match=r"^time of mode 'a' of stage\[0\] must be positive, got 0$"):
        place([1, 2], [Stage(modes=[Mode("a", 0)])])


def drawn(n: int, limit: int) -> list[int]:
    random = Random(n + limit)
    return [random.randrange(1, limit) for _ in range(n)]


@cases("constraints", [{}, {"transfer": 300}, {"memory": 1000}])
def test_place_scales_with_layers_plus_stages(constraints):
    counts = []
    for n, k in ((500, 20), (4000, 160)):
        call = {name: drawn(n, value) for name, value in constraints.items()}
        counts.append(steps(place, drawn(n, 1000), k, **call))
    assert counts[1] < 8 * 2 * counts[0]


def test_verify_makespan_is_quadratic_per_stage():
    n, k = 200, 6
    costs, call = drawn(n, 1000), {"transfer": drawn(n, 300), "microbatches": 8, "objective": "makespan"}
    found = place(costs, k, **call)
    assert steps(verify, found, costs, k, **call) < 2 * n * n * k


GROWTHS = {
    "convex": lambda n: [i * i for i in range(n)] + [10**15],
    "convex, falling": lambda n: [10**15] + [i * i for i in range(n, 0, -1)],
    "doubling": lambda n: [2**i for i in range(n)],
    "one in front": lambda n: [10**15] + [1] * n,
    "equal": lambda n: [7] * n,
    "valley": lambda n: [(i - n // 2) ** 2 for i in range(n)],
    "floats": lambda n: [Random(n + i).random() for i in range(n)],
    "sawtooth": lambda n: [i % 17 * 1000 + i for i in range(n)],
}


@cases("growth", list(GROWTHS))
@cases("share", [2, 3, 10])
def test_steps_grow_linearly_with_layers(growth, share):
    """Count executed lines instead of seconds. Several sizes are summed, since a search may need a few passes more."""
    costs = GROWTHS[growth]
    few, many = (sum(steps(partition, costs(n), n // share) for n in (m, m + m // 4)) for m in (300, 2400))
    assert many < 8 * 1.6 * few
