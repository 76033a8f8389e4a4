"""Alternatives for each stage: what a mode costs, and which is chosen. That it is the best, `test_place` shows."""

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpartition import Infeasible, Mode, Stage, place, verify

from .cases import cases
from .strategies import Placing, placings

KEEP = Mode("keep")
RECOMPUTE = Mode("recompute", time=Fraction(4, 3), saved=0, transient=1)


def value(problem: Placing, objective="bottleneck"):
    try:
        return getattr(place(problem.costs, problem.stages, **problem.constraints, objective=objective), objective)
    except Infeasible:
        return None


def with_modes(problem: Placing, *more: Mode) -> Placing:
    return replace(problem, stages=[replace(stage, modes=[*stage.modes, *more]) for stage in problem.stages])


@given(placings(modes=False))
def test_factors_say_the_same_as_values_for_each_layer(problem):
    kept = problem.constraints["activations"] or [0] * len(problem.costs)
    problem.constraints["memory"] = problem.constraints["memory"] or [0] * len(problem.costs)
    lists = Mode("a", [Fraction(3, 2) * Fraction(x) for x in problem.costs], [Fraction(x) / 2 for x in kept], 1, kept)
    factors = Mode("a", Fraction(3, 2), Fraction(1, 2), 1, 1)
    assert value(with_modes(problem, factors)) == value(with_modes(problem, lists))


@given(placings(modes=False, boundary=None), st.integers(0, 3))
def test_a_factor_on_the_boundary_is_as_good_as_a_larger_boundary(problem, factor):
    boundary = [3 * i % 5 for i in range(len(problem.costs))]
    once, more = (
        replace(problem, constraints={**problem.constraints, "boundary": [times * x for x in boundary]})
        for times in (1, factor)
    )
    assert value(with_modes(once, Mode("a", boundary=factor))) == value(more)


def test_the_boundary_is_that_of_the_cut_before_the_stage():
    """Only a cut before the third layer is narrow enough for two micro-batches."""
    stages = [Stage(capacity=6), Stage(capacity=6)]
    call = {"memory": [1, 1, 1, 1], "boundary": [1, 9, 1, 9], "in_flight": [2, 2]}
    assert place([9, 1, 1, 1], stages, **call).sizes == (2, 2)
    with pytest.raises(Infeasible):
        place([9, 1, 1, 1], stages, **{**call, "boundary": [1, 9, 3, 9]})


def test_an_earlier_start_is_kept_where_the_next_needs_one_more():
    """From the second layer the last stage needs 3, from the third 4."""
    call = {"memory": [0, 1, 1], "boundary": [0, 1, 3]}
    assert place([1, 1, 1], [Stage(), Stage(1, 3)], **call).sizes == (1, 2)
    assert place([1, 1, 1], [Stage(), Stage(1, 3)], **call, objective="makespan", microbatches=2).sizes == (1, 2)
    with pytest.raises(Infeasible) as refused:
        place([1, 1, 1], [Stage(), Stage(1, 2)], **call)
    assert refused.value.scale == Fraction(3, 2)


def test_what_enters_the_first_layer_may_be_left_out():
    long, short = ({"boundary": boundary, "memory": [1, 1]} for boundary in ([0, 4], [4]))
    assert place([1, 1], [Stage(1, 5)] * 2, **long) == place([1, 1], [Stage(1, 5)] * 2, **short)
    with pytest.raises(Infeasible):
        place([1, 1], [Stage(1, 4)] * 2, **short)


def test_only_stages_short_of_memory_recompute():
    """1F1B: the first stage holds four micro-batches, the last one."""
    stages = [Stage(capacity=10, modes=[KEEP, RECOMPUTE])] * 4
    found = place([3] * 8, stages, activations=[2] * 8, boundary=[1] * 8, in_flight="1f1b")
    assert (found.sizes, found.modes) == ((2, 2, 2, 2), ("recompute", "recompute", "keep", "keep"))
    assert found.times == (8, 8, 6, 6)
    verify(found, [3] * 8, stages, activations=[2] * 8, boundary=[1] * 8, in_flight="1f1b")


def test_of_two_modes_as_good_the_earlier_is_chosen():
    for modes in ([Mode("a"), Mode("b")], [Mode("b"), Mode("a")]):
        assert place([1, 1], [Stage(modes=modes)] * 2).modes == (modes[0].name,) * 2


def test_modes_may_differ_from_stage_to_stage():
    fast = Mode("fast", time=[1, 1, 9, 9])
    found = place([9, 9, 1, 1], [Stage(modes=[KEEP, fast]), Stage()], pin=[2])
    assert (found.modes, found.times, found.loads) == (("fast", None), (2, 2), (18, 2))
    assert found.lower_bound == 2


def test_another_mode_than_the_chosen_one_is_noticed():
    stages = [Stage(capacity=10, modes=[KEEP, RECOMPUTE])] * 2
    call = {"activations": [2] * 4, "boundary": [1] * 4, "in_flight": [3, 1]}
    found = place([3] * 4, stages, **call)
    assert found.modes == ("recompute", "keep")
    for modes, message in [
        (("keep", "keep"), r"^layers 0 to 1 do not fit on their stage$"),
        (("recompute", "recompute"), r"^times should be .*8.*8.*, the result says .*8.*6"),
        (("recompute", None), r"^stage 1 has no mode None$"),
        (("recompute", "drop"), r"^stage 1 has no mode 'drop'$"),
        (("recompute",), r"^2 blocks and 1 mode for 2 stages$"),
    ]:
        with pytest.raises(ValueError, match=message):
            verify(replace(found, modes=modes), [3] * 4, stages, **call)


@cases("objective", ["bottleneck", "makespan"])
def test_large_placements_with_modes_prove_themselves(objective):
    random = Random(3)
    n, k = (80, 6) if objective == "makespan" else (200, 16)
    costs, memory, kept, crossing = ([random.randrange(1, 100) for _ in range(n)] for _ in range(4))
    room = (sum(memory) + 3 * sum(kept)) // k
    stages = [Stage(random.choice([1, 2]), room, [KEEP, Mode("half", 1.2, 0.5), RECOMPUTE]) for _ in range(k)]
    call = {"memory": memory, "activations": kept, "boundary": crossing, "in_flight": "1f1b", "microbatches": 8}
    found = place(costs, stages, **call, objective=objective, gap=0.05)
    assert len(set(found.modes)) > 1
    verify(found, costs, stages, **call, objective=objective, gap=0.05)


@cases(
    ("stage", "error", "message"),
    [
        (lambda: Stage(modes=KEEP), TypeError, r"^modes must be a sequence of Modes, got Mode\("),
        (lambda: Stage(modes=None), TypeError, r"^modes must be a sequence of Modes, got None$"),
        (lambda: Stage(modes="keep"), TypeError, r"^modes must be a sequence of Modes, got 'keep'$"),
        (lambda: Stage(modes=[KEEP, "b"]), TypeError, r"^modes\[1\] must be a Mode, got 'b' of type str$"),
        (lambda: Stage(modes=[KEEP, Mode("keep", 2)]), ValueError, r"^2 modes are called 'keep'; the names of"),
        (lambda: Stage(modes=[Mode(1)]), TypeError, r"^name must be a str, got 1 of type int$"),
        (lambda: Stage(modes=[Mode("a", 0)]), ValueError, r"^time of mode 'a' of stage\[0\] must be positive, got 0$"),
        (
            lambda: Stage(modes=[Mode("a", -1)]),
            ValueError,
            r"^time of mode 'a' of stage\[0\] must not be negative, got",
        ),
        (lambda: Stage(modes=[Mode("a", "b")]), TypeError, r"^time of mode 'a' of stage\[0\] must be an int, a float"),
        (
            lambda: Stage(modes=[Mode("a", [1])]),
            ValueError,
            r"^time of mode 'a' of stage\[0\] has 1 entry for 2 layers$",
        ),
        (lambda: Stage(modes=[Mode("a", saved=True)]), TypeError, r"^saved of mode 'a' of stage\[0\] must be an int"),
        (
            lambda: Stage(modes=[Mode("a", boundary=[1])]),
            TypeError,
            r"^boundary of mode 'a' of stage\[0\] must be an int",
        ),
        (
            lambda: Stage(modes=[Mode("a", transient=-1)]),
            ValueError,
            r"^transient of mode 'a' of stage\[0\] must not be",
        ),
    ],
)
def test_impossible_modes_are_named(stage, error, message):
    with pytest.raises(error, match=message):
        place([1, 2], [stage()])


@cases(
    ("boundary", "message"),
    [([1], r"^boundary has 1 entry for 3 layers$"), ([1, 2, -3], r"^boundary\[2\] must not be negative, got -3$")],
)
def test_impossible_boundaries_are_named(boundary, message):
    with pytest.raises(ValueError, match=message):
        place([1, 2, 3], 2, boundary=boundary)


def test_stages_and_modes_are_values():
    assert Stage(modes=[Mode("a", [1, 2])]) == Stage(modes=(Mode("a", (1, 2)),))
    assert len({Stage(modes=[Mode("a", [1, 2])]), Stage(modes=(Mode("a", (1, 2)),))}) == 1
