"""The rules of a spec: as values, around values, and for each leaf of a value."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given

from microbatch import (
    Arguments,
    Mean,
    Replicate,
    Split,
    Sum,
    check,
    flatten,
    gather,
    rules,
    scatter,
    scatter_views,
    unflatten,
    unwrap,
)

from .same import assert_same
from .strategies import Output, Pair, Problem, Sample, problems

x = torch.arange(12.0).view(3, 4)


@given(problems())
def test_around_a_value_is_as_in_a_spec(problem: Problem) -> None:
    value, chunks, spec = problem
    told = rules(value, spec)
    assert [rule is None for rule in told] == [leaf is None for leaf in problem.leaves]
    assert rules(value, Replicate()) == [Replicate()] * len(problem.leaves)
    leaves, tree = flatten(value)
    around = [
        Split(leaf, dim=rule.dim, counts=rule.counts) if isinstance(rule, Split) else Replicate(leaf) if rule else leaf
        for leaf, rule in zip(leaves, told, strict=True)
    ]
    wrapped = unflatten(around, tree)
    check(wrapped)
    for mine, theirs in zip(scatter(wrapped, chunks), scatter(value, chunks, spec), strict=True):
        assert_same(mine.value, theirs.value)
        assert mine.rows == theirs.rows
    bare, found = unwrap(wrapped)
    assert_same(bare, value)
    assert_same(gather(scatter_views(bare, chunks, found)[0], spec), value)


def test_said_twice() -> None:
    assert scatter((Split(x, dim=1),), 2, (Split(1),))[0][0].shape == (3, 2)
    for wrapped, spec in [(Split(x, dim=1), Split(0)), (Replicate(x), Split(0)), (Split(x), Replicate())]:
        with pytest.raises(ValueError, match=r"^input\[1\] has two rules, .* and .*; give it one rule"):
            scatter((x, wrapped), 2, (None, spec))
    with pytest.raises(ValueError, match="give it one rule"):
        scatter((x, Replicate(Split(x, dim=1))), 2)


@pytest.mark.parametrize("rule", [Mean(), Sum()])
def test_an_input_is_not_reduced(rule: Any) -> None:
    with pytest.raises(TypeError, match=rf"^the spec has {rule.__class__.__name__}\(\) for input\[0\], which combines"):
        scatter((x,), 2, (rule,))
    with pytest.raises(TypeError, match="which combines outputs"):
        check((x,), rule)


def test_text_and_copies() -> None:
    written = {
        "Split(0)": Split(),
        "Split(-1)": Split(-1),
        "Split('text', dim=1)": Split("text", dim=1),
        "Split(0, counts=(2, 0))": Split(counts=torch.tensor([2, 0])),
        "Replicate()": Replicate(),
        "Replicate(3)": Replicate(3),
        "Mean()": Mean(),
        "Sum()": Sum(),
    }
    again = pickle.loads(pickle.dumps(written))
    assert again == written
    for text, rule in written.items():
        assert repr(rule) == repr(again[text]) == text


def test_prefix_applies_to_its_subtree() -> None:
    value = {"a": x, "b": (x, [x, None]), "c": (3, "text"), "d": x}
    spec = {"a": Split(1), "b": Split(-1), "c": Replicate()}
    expected = [Split(1), Split(-1), Split(-1), None, Replicate(), Replicate(), Split(0)]
    assert rules(value, spec) == expected


@pytest.mark.parametrize(
    ("value", "spec", "path"),
    [
        ((x, x), (None,), "input"),
        ((x,), (None, None), "input"),
        ({"a": x}, {"b": None}, "input"),
        ({"a": x}, {"a": None, "b": None}, "input"),
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


@pytest.mark.parametrize("wrong", [0, "rows", Split, Replicate, Replicate(3)])
def test_a_spec_of_something_else(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^spec for input\['a'\] is .*; expected Split\(dim\), Replicate\(\), None"):
        scatter({"a": x}, 2, {"a": wrong})


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        (42, "input", "int"),
        ("str", "input", "str"),
        ((x, 2), r"input\[1\]", "int"),
        ((x, (None, 2.5)), r"input\[1\]\[1\]", "float"),
        ({"mask": [x, "causal"], "z": 1}, r"input\['mask'\]\[1\]", "str"),
        ({3: object()}, r"input\[3\]", "object"),
        (Pair(x, {1, 2}), r"input\.right", "set"),
        (Sample(x, 3), r"input\.label", "int"),
        (Output(logits=x, n=3), r"input\['n'\]", "int"),
        ((i for i in "x"), "input", "generator"),
    ],
)
def test_the_first_other_thing_is_named(value: Any, path: str, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"^{path} is of type {kind}, which cannot be split; .*Replicate\(\)"):
        check(value)


def test_arguments_are_cut_together() -> None:
    x, mask = torch.randn(7, 3), torch.rand(7, 3)
    value = Arguments((x,), {"mask": mask, "scale": Replicate(2.0)})
    check(value)
    batches = scatter(value, 4)
    result = gather(
        [batch.call(lambda given: given.args[0] * given.kwargs["mask"] * given.kwargs["scale"]) for batch in batches]
    )
    torch.testing.assert_close(result, x * mask * 2.0)
    assert all(type(batch.value) is Arguments and batch.value.kwargs["scale"] == 2.0 for batch in batches)
