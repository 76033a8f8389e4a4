"""Rules as values, and around values."""

import pickle
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given

from microbatch import Mean, Replicate, Split, Sum, check, gather, rules, scatter, scatter_views, unwrap

from .same import assert_same
from .strategies import Problem, problems

x = torch.arange(12.0).view(3, 4)


@given(problems())
def test_around_a_value_is_as_in_a_spec(problem: Problem) -> None:
    value, chunks, spec = problem
    told = rules(value, spec)
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
