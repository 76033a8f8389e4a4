from dataclasses import replace
from fractions import Fraction

from hypothesis import example, given

from blockpartition import Infeasible, Stage, place

from . import oracle
from .cases import cases
from .strategies import Placing, placings


def refusal(costs, stages, **constraints) -> Infeasible | None:
    try:
        place(costs, stages, **constraints)
    except Infeasible as error:
        return error
    return None


def scaled(problem: Placing, factor: Fraction) -> list[Stage]:
    return [
        replace(stage, capacity=None if stage.capacity is None else Fraction(stage.capacity) * factor)
        for stage in problem.stages
    ]


@given(placings())
def test_scale_is_smallest_sufficient_factor(problem):
    error = refusal(problem.costs, problem.stages, **problem.constraints)
    if error is None or error.scale is None:
        return
    assert error.scale > 1
    assert refusal(problem.costs, scaled(problem, error.scale), **problem.constraints) is None
    less = scaled(problem, error.scale * Fraction(10**9 - 1, 10**9))
    assert refusal(problem.costs, less, **problem.constraints) is not None


@given(placings())
@example(Placing([1.0, 1.7976931348623157e308], [Stage(1)], {}))
def test_the_smallest_common_capacity_would_do(problem):
    stages = [replace(stage, capacity=0.25) for stage in problem.stages]
    error = refusal(problem.costs, stages, **problem.constraints)
    if error is None or error.scale is None:
        return
    enough = [replace(stage, capacity=error.capacity) for stage in stages]
    assert refusal(problem.costs, enough, **problem.constraints) is None
    assert f"the smallest sufficient capacity of each stage is {error.capacity}" in str(error)


@given(placings())
def test_where_no_factor_helps_endless_room_does(problem):
    error = refusal(problem.costs, problem.stages, **problem.constraints)
    if error is None or error.scale is not None:
        return
    if "capacit" in str(error):
        assert any(stage.capacity == 0 for stage in problem.stages)
    endless = [replace(stage, capacity=None) for stage in problem.stages]
    assert (refusal(problem.costs, endless, **problem.constraints) is None) == ("capacit" in str(error))


@given(placings(max_layers=6, forbid=[], modes=False))
def test_error_names_first_layer_that_never_fits(problem):
    """Compare with a separate single-layer problem per layer, on each stage with its micro-batches in flight."""
    error = refusal(problem.costs, problem.stages, **problem.constraints)
    if error is None or "capacit" not in str(error):
        return
    in_flight, m = problem.constraints["in_flight"], problem.constraints["microbatches"]
    factors = oracle.factors_of(in_flight, len(problem.stages), m)

    def fits(i: int) -> bool:
        vectors = {name: problem.constraints[name] for name in ("memory", "activations")}
        alone = {name: values and values[i : i + 1] for name, values in vectors.items()}
        return any(
            refusal([problem.costs[i]], [stage], in_flight=[factor], **alone) is None
            for stage, factor in zip(problem.stages, factors, strict=True)
        )

    homeless = [i for i in range(len(problem.costs)) if not fits(i)]
    assert error.layer == (homeless[0] if homeless else None)


def test_layers_that_no_cut_may_part():
    error = refusal([1, 4, 4, 1], [Stage(1, 5), Stage(1, 5)], forbid=[2])
    assert (error.layer, error.scale, error.capacity) == (1, Fraction(9, 5), 9)
    assert str(error) == (
        "layers 1 to 2, which no cut may split, need at least 8 and fit on no stage; "
        "the smallest sufficient capacity of each stage is 9"
    )


@cases(
    ("arguments", "message"),
    [
        ({"pin": [1, 2], "stages": 2}, "the pinned cuts make at least 3 blocks for 2 stages"),
        ({"forbid": [1, 3], "stages": 3}, "the allowed cuts make at most 2 blocks for 3 stages"),
    ],
)
def test_too_many_cuts_or_too_few(arguments, message):
    error = refusal([1, 1, 1, 1], **arguments)
    assert (str(error), error.layer, error.scale, error.capacity) == (message, None, None, None)
