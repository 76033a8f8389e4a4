"""The rules of a spec: as values, around values, and for each leaf of a value."""

import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from torch import nn

from microbatch import Arguments, Mean, Replicate, Split, Sum, check, gather, rules, scatter, scatter_views, unwrap

from .same import assert_same
from .strategies import Output, Pair, Problem, Sample, problems

x = torch.arange(12.0).view(3, 4)


@given(problems())
def test_around_a_value_is_as_in_a_spec(problem: Problem) -> None:
    value, chunks, spec = problem
    told = rules(value, spec)
    assert [rule is None for rule in told] == [leaf is None for leaf in problem.leaves]
    assert rules(value, Replicate()) == [Replicate()] * len(problem.leaves)
    leaves, tree = pytree.tree_flatten(value)
    around = [
        Split(leaf, dim=rule.dim) if isinstance(rule, Split) else Replicate(leaf) if rule else leaf
        for leaf, rule in zip(leaves, told, strict=True)
    ]
    wrapped = pytree.tree_unflatten(around, tree)
    check(wrapped)
    for mine, theirs in zip(scatter(wrapped, chunks), scatter(value, chunks, spec), strict=True):
        assert_same(mine.value, theirs.value)
        assert mine.rows == theirs.rows
    bare, found = unwrap(wrapped)
    assert_same(bare, value)
    assert_same(gather(scatter_views(bare, chunks, found)[0], spec), value)


def test_around_a_branch() -> None:
    a, b = scatter((x.T, Replicate({"mask": x, "n": (3, "text")}), Split([x, (x,)], dim=1)), 2)
    assert a.value[1]["mask"] is b.value[1]["mask"] is x
    assert a.value[1]["n"] == (3, "text")
    assert a.value[2][0].shape == a.value[2][1][0].shape == (3, 2)


def test_around_it_all() -> None:
    assert [tuple(batch.tensor.shape) for batch in scatter(Split(x, dim=1), 2)] == [(3, 2), (3, 2)]
    assert [tuple(batch.tensor.shape) for batch in scatter(Split(x), 3)] == [(1, 4)] * 3
    assert [batch.value[1] for batch in scatter((x, Split(None, dim=1)), 2)] == [None, None]


def test_what_is_not_wrapped_is_returned_as_it_is() -> None:
    value, spec = {"x": x}, {"x": Split(1)}
    assert unwrap(value, spec) == (value, spec)
    assert unwrap(x)[0] is x


def test_what_has_no_tensor_may_be_replicated_under_any_rule() -> None:
    parts = scatter((x, Replicate("text"), Replicate([1, 2])), 2, Split(1))
    assert [(part.value[0].shape, *part.value[1:]) for part in parts] == [
        ((3, 2), "text", [1, 2]),
        ((3, 2), "text", [1, 2]),
    ]


def test_said_twice() -> None:
    assert scatter((Split(x, dim=1),), 2, (Split(1),))[0][0].shape == (3, 2)
    for wrapped, spec in [(Split(x, dim=1), Split(0)), (Replicate(x), Split(0)), (Split(x), Replicate())]:
        with pytest.raises(
            ValueError, match=r"^input\[1\] is given as .*, but the spec says .*; declare it in one place"
        ):
            scatter((x, wrapped), 2, (None, spec))
    with pytest.raises(ValueError, match="declare it in one place"):
        scatter((x, Replicate(Split(x, dim=1))), 2)


def test_a_rule_with_a_value_is_no_rule_of_a_spec() -> None:
    with pytest.raises(TypeError, match=r"^spec for input is Replicate\(3\); expected"):
        scatter(x, 2, Replicate(3))


def test_a_rule_without_a_value_is_no_value() -> None:
    with pytest.raises(TypeError, match=r"^input\[1\] is of type Replicate, which cannot be split"):
        scatter((x, Replicate()), 2)


@pytest.mark.parametrize("rule", [Mean(), Sum()])
def test_an_input_is_not_reduced(rule: Any) -> None:
    with pytest.raises(TypeError, match=rf"^the spec says {rule.__class__.__name__}\(\) for input\[0\], which puts"):
        scatter((x,), 2, (rule,))
    with pytest.raises(TypeError, match="which puts outputs together"):
        check((x,), rule)


def test_text_and_copies() -> None:
    everything = [Split(), Split(-1), Split("text", dim=1), Replicate(), Replicate(3), Mean(), Sum()]
    texts = ["Split(0)", "Split(-1)", "Split('text', dim=1)", "Replicate()", "Replicate(3)", "Mean()", "Sum()"]
    assert [repr(rule) for rule in everything] == texts
    again = pickle.loads(pickle.dumps(everything))
    assert [repr(rule) for rule in again] == texts
    assert again == everything


def test_a_prefix_holds_for_everything_below_it_and_none_is_the_default() -> None:
    value = {"a": x, "b": (x, [x, None]), "c": (3, "text"), "d": x}
    spec = {"a": Split(1), "b": Split(-1), "c": Replicate(), "d": None}
    expected = [Split(1), Split(-1), Split(-1), None, Replicate(), Replicate(), Split(0)]
    assert rules(value, spec) == expected


def test_any_mapping_with_the_same_keys_does_in_any_order() -> None:
    assert rules(Output(a=x, n=3), {"n": Replicate(), "a": Split(1)}) == [Split(1), Replicate()]


def test_a_dataclass_may_have_fields_that_are_none() -> None:
    assert rules(Sample(x, 3), Sample(None, Replicate())) == [Split(0), Replicate()]
    batches = scatter(Sample(x, None), 2, Sample(Split(1), Split(0)))
    assert batches[0].value.image.shape == (3, 2)
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


@pytest.mark.parametrize("value", [x, (x,), (x, x), (), None, (x, None), [x], {"a": {"b": x}}, Sample(x, None)])
def test_tensors_and_none_pass_by_themselves(value: Any) -> None:
    check(value)


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


def test_packed_sequences_do_not_pass() -> None:
    with pytest.raises(TypeError, match=r"^input\['x'\]\.data belongs to a PackedSequence"):
        check({"x": nn.utils.rnn.pack_sequence([torch.ones(2, 1)])})


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


def test_they_are_a_spec_for_themselves() -> None:
    value = Arguments((torch.ones(4),), {"mask": torch.ones(3)})
    a, b = scatter(value, 2, Arguments((None,), {"mask": Replicate()}))
    assert a.value.kwargs["mask"] is b.value.kwargs["mask"]
