from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from hypothesis import given

from microbatch import Replicate, Split, check, gather, scatter
from microbatch._spec import rules

from .strategies import Output, Pair, Problem, Sample, problems

x = torch.ones(4, 4)


@given(problems())
def test_there_is_a_rule_for_each_leaf(problem: Problem) -> None:
    found = rules(problem.value, problem.spec, "input")
    for leaf, rule in zip(problem.leaves, found, strict=True):
        assert (leaf is None) == (rule is None)


@given(problems())
def test_one_rule_holds_for_everything_below(problem: Problem) -> None:
    rule = Replicate()
    assert rules(problem.value, rule, "input") == [rule] * len(problem.leaves)


def test_a_prefix_holds_for_everything_below_it_and_none_is_the_default() -> None:
    value = {"a": x, "b": (x, [x, None]), "c": (3, "text"), "d": x}
    spec = {"a": Split(1), "b": Split(-1), "c": Replicate(), "d": None}
    expected = [Split(1), Split(-1), Split(-1), None, Replicate(), Replicate(), Split(0)]
    assert rules(value, spec, "input") == expected


def test_the_order_of_keys_does_not_matter() -> None:
    spec = {"b": Replicate(), "a": Split(1)}
    assert rules({"a": x, "b": x}, spec, "input") == [Split(1), Replicate()]


def test_any_mapping_with_the_same_keys_does() -> None:
    assert rules(Output(a=x, n=3), {"a": None, "n": Replicate()}, "input") == [Split(0), Replicate()]


def test_a_dataclass_may_have_fields_that_are_none() -> None:
    assert rules(Sample(x, 3), Sample(None, Replicate()), "input") == [Split(0), Replicate()]
    batches = scatter(Sample(x, None), 2, Sample(Split(1), Split(0)))
    assert batches[0].value.image.shape == (4, 2)
    assert gather(batches, Sample(Split(1), None)).image.equal(x)


@pytest.mark.parametrize(
    ("value", "spec", "path"),
    [
        ((x, x), (None,), "input"),
        ((x,), (None, None), "input"),
        ({"a": x}, {"b": None}, "input"),
        ({"a": x, "b": x}, {"a": None}, "input"),
        (x, (None,), "input"),
        ((x, {"a": [x]}), (None, {"a": [None, None]}), r"input\[1\]\['a'\]"),
        (Pair(x, x), (None, None), "input"),
    ],
)
def test_a_spec_that_does_not_fit(value: Any, spec: Any, path: str) -> None:
    with pytest.raises(ValueError, match=rf"^spec does not fit {path}: spec has .*, {path} has "):
        scatter(value, 2, spec)
    with pytest.raises(ValueError, match=rf"^spec does not fit {path}"):
        check(value, spec)


@pytest.mark.parametrize("wrong", [0, "rows", Split, Replicate])
def test_a_spec_of_something_else(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^spec for input\['a'\] is .*; expected Split\(dim\), Replicate\(\), None"):
        scatter({"a": x}, 2, {"a": wrong})


@pytest.mark.parametrize("dim", [None, 1.0, "1", True])
def test_the_dimension_is_an_integer(dim: Any) -> None:
    with pytest.raises(TypeError, match=r"dim of Split is .*; expected an integer"):
        Split(dim)


def test_rules_are_values() -> None:
    assert Split() == Split(0) != Split(1)
    assert Replicate() == Replicate()
    assert len({Split(1), Split(1), Replicate(), Replicate()}) == 2
    with pytest.raises(FrozenInstanceError):
        Split().dim = 1  # type: ignore[misc]
