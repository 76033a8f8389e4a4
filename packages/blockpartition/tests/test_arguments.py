import pytest

from blockpartition import Stage, partition, place, solve, verify

from .cases import cases

VALUE_ERRORS = [
    ({"stages": 0}, r"^stages must be at least 1, got 0$"),
    ({"stages": 5}, r"^4 layers cannot fill 5 stages; use at most 4$"),
    ({"stages": [Stage(), Stage(0)]}, r"^speed of stage\[1\] must be positive, got 0$"),
    ({"memory": [1, 2, 3]}, r"^memory must have one number per layer \(4\), got 3$"),
    ({"transfer": [1] * 5}, r"^transfer must have one number per layer \(4\), got 5$"),
    ({"in_flight": "gpipe"}, r"^in_flight must be one of '1f1b', 'fill_drain', got 'gpipe'$"),
    (
        {"in_flight": "fill_drain"},
        r"^in_flight='fill_drain' holds every micro-batch: pass their number, microbatches=…$",
    ),
    ({"pin": [1, 4]}, r"^pin has the cut 4; cuts of 4 layers are below 4$"),
    ({"forbid": [3, 1, 2], "pin": [3, 1]}, r"^cuts \[1, 3\] are both pinned and forbidden$"),
    ({"gap": -0.1}, r"^gap must not be negative, got -0.1$"),
    ({"objective": "makespan"}, r"^objective='makespan' depends on how many micro-batches there are"),
    ({"objective": "speed"}, r"^objective must be one of 'bottleneck', 'makespan', got 'speed'$"),
]
TYPE_ERRORS = [
    ({"stages": 2.0}, r"^stages must be an int, got 2.0 of type float$"),
    ({"stages": [Stage(), 2]}, r"^stages\[1\] must be a Stage, got 2 of type int$"),
    ({"stages": [Stage("fast"), Stage()]}, r"^speed of stage\[0\] must be an int, a float or a Fraction, got 'fast'"),
    ({"memory": [1, 2, 3, True]}, r"^memory\[3\] must be an int, a float or a Fraction, got True of type bool$"),
    ({"pin": [1.0]}, r"^pin\[0\] must be an int, got 1.0 of type float$"),
]


@cases(("arguments", "message"), [*VALUE_ERRORS, *TYPE_ERRORS])
def test_what_is_wrong_is_named(arguments, message):
    error = ValueError if (arguments, message) in VALUE_ERRORS else TypeError
    with pytest.raises(error, match=message):
        place(**{"costs": [1, 2, 3, 4], "stages": 2, **arguments})


@pytest.mark.parametrize("call", [solve, partition, place])
def test_impossible_numbers_of_blocks(call):
    for k in (0, -2, 4):
        with pytest.raises(ValueError, match=r"must be at least 1|3 layers cannot fill 4 stages; use at most 3"):
            call([1, 2, 3], k)
    for k in (True, 2.0, "2"):
        with pytest.raises(TypeError, match=r"must be an int|must be a Stage"):
            call([1, 2, 3], k)
    with pytest.raises(ValueError, match=r"^there are no layers, and each stage needs at least one$"):
        call([], 1)


def test_an_unknown_tie_break_is_named():
    with pytest.raises(ValueError, match=r"even must be one of 'quantile', 'exact', got"):
        partition([1], 1, even=["quantile"])


def test_generators_are_read_once():
    found = place(
        iter([1, 2, 3, 4]), iter([Stage(1, 9), Stage(1, 9)]), memory=iter([3, 3, 3, 3]), activations=iter([0] * 4),
        transfer=iter([0] * 3), forbid=iter([1]), pin=iter([2]), in_flight=iter([1, 1]),
    )  # fmt: skip
    assert found.sizes == (2, 2)


class Scalar:
    """An array without dimensions."""

    def __iter__(self):
        raise TypeError("iteration over a 0-d array")


@pytest.mark.parametrize("costs", [None, 5, 1.5, object(), "123", b"123", {1: 2}, {1, 2}, Scalar()])
def test_what_is_no_list_of_costs_is_named(costs):
    found = partition([1, 2], 2)
    for name, call in {
        "sequence": lambda: solve(costs, 2),
        "costs": lambda: partition(costs, 2),
        " costs": lambda: place(costs, 2),
        "  costs": lambda: verify(found, costs),
    }.items():
        with pytest.raises(TypeError, match=f"^{name.strip()} must be a sequence of numbers"):
            call()
