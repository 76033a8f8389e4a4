"""Names and namespaces of skips, and violations of their rules. test_step.py trains models with skips."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, inline
from gpipe._current import current
from gpipe.skip import Namespace, inspect_skip_layout, pop, skippable, stash, verify_skippables

from ..layers import MODES, Call, Layer, Pop, Stash, assert_same, assert_trains_like, linear, piped, rows
from ..models import Recipe, joined, recipes


@given(recipes())
def test_layout_has_the_skips_that_cross_a_cut(recipe: Recipe):
    model = recipe.model()
    layers, start, places = list(model), 0, {}
    balance = recipe.balance(len(layers))
    for j, size in enumerate(balance):
        for layer in layers[start : start + size]:
            for key in getattr(layer, "stashable", list)():
                places[key] = [j]
            for key in getattr(layer, "poppable", list)():
                places[key].append(j)
        start += size
    pipe = GPipe(model, balance, devices=["cpu"] * len(balance))
    layout = inspect_skip_layout(list(pipe.partitions))
    for key, (source, target) in places.items():
        assert layout.requires_copy(*key) == (source != target)
        assert ((source, *key) in layout.copy_policy(target)) == (source != target)


def test_stash_may_alternate_between_none_and_tensor():
    sometimes = Stash(lambda x: x * 2 if float(x[0, 0].detach()) > 0 else None)
    model = nn.Sequential(linear(), sometimes, linear(), Pop(partial(joined, False)), linear())
    for mode in MODES:
        pipe = piped(model, [2, 1, 2], chunks=6, checkpoint=mode)
        model.zero_grad()
        pipe(rows()).square().sum().backward()
        for row in rows().split(1):
            model(row).square().sum().backward()
        assert_same(pipe, model)


def test_namespace_equals_its_copies_only():
    ns, other = Namespace(), Namespace()
    for again in (copy.copy(ns), copy.deepcopy(ns), pickle.loads(pickle.dumps(ns))):
        assert again == ns
        assert hash(again) == hash(ns)
    assert ns != other
    assert ns != "ns"
    assert (ns < other) != (other < ns)


@given(st.lists(st.none() | st.sets(st.sampled_from(["a", "b"])), max_size=4))
def test_last_isolate_sets_the_namespace(onlys: list[set[str] | None]):
    class Two(nn.Module):
        """About it."""

    decorated, expected = skippable(stash=["a", "b"])(Two), dict.fromkeys("ab")
    assert (decorated.__name__, decorated.__doc__) == ("Two", "About it.")
    layer = decorated()
    assert isinstance(layer, Two)
    for only in onlys:
        ns = Namespace()
        assert layer.isolate(ns, only=only) is layer
        expected.update(dict.fromkeys("ab" if only is None else only, ns))
    assert {name: ns for ns, name in layer.stashable()} == expected
    assert [layer.key(name) for name in "ab"] == [(expected[name], name) for name in "ab"]


def test_failed_run_drops_its_skips():
    """Layers called outside the run are plain modules again."""

    def fail(x: Tensor) -> Tensor:
        raise KeyError("no more")

    pipe = GPipe(nn.Sequential(Stash(), Call(fail), Pop()), [1, 2], devices=["cpu"] * 2)
    before = current.work.skips
    with inline(), pytest.raises(KeyError, match="no more"):
        pipe(rows())
    assert current.work.skips is before
    with pytest.raises(RuntimeError, match="'skip' is popped, but no earlier layer has stashed it"):
        Pop()(rows())


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([Stash()], "no module declared 'skip' as poppable"),
        ([Pop()], "declared 'skip' as poppable but it was not stashed"),
        ([Pop(), Stash()], "declared 'skip' as poppable but it was not stashed"),
        ([Stash(), Stash(), Pop()], "redeclared 'skip' as stashable"),
        ([Stash(), Pop(), Pop()], "redeclared 'skip' as poppable"),
        ([Stash().isolate(Namespace()), Pop()], "not stashed"),
        ([Stash(), nn.Sequential(nn.Sequential(Pop(), Pop()))], "'1.0.1' redeclared"),
    ],
)
def test_what_does_not_match_is_refused(layers: list[nn.Module], problem: str):
    model = nn.Sequential(*layers)
    with pytest.raises(TypeError, match=problem):
        verify_skippables(model)
    with pytest.raises(TypeError, match=problem):
        GPipe(model, [len(layers)], devices=["cpu"])


def test_a_name_is_not_a_list_of_names():
    for wrong, told in (("skip", r"\['skip'\]"), ([3], "3 is of type int")):
        for argument in ("stash", "pop"):
            with pytest.raises(TypeError, match=told):
                skippable(**{argument: wrong})
    for ns, only, error in (
        (Namespace(), "skip", TypeError),
        ("skip", None, TypeError),
        (Namespace(), ["other"], ValueError),
    ):
        with pytest.raises(error, match=r"only must be a list|must be a Namespace|declares"):
            Stash().isolate(ns, only=only)


def commands(*given: Any) -> nn.Module:
    """Return a layer that declares to stash ``a`` and pop ``b``, and yields the given commands."""

    @skippable(stash=["a"], pop=["b"])
    class Yields(nn.Module):
        def forward(self, x: Tensor) -> Any:
            for command in given:
                yield command() if callable(command) else command
            return x

    return Yields()


@pytest.mark.parametrize(
    ("layer", "error", "text"),
    [
        (commands(stash("a", None)), RuntimeError, "'b' must be popped but has not been"),
        (commands(stash("c", None)), RuntimeError, "'c' has not been declared as stashable"),
        (commands(pop("c")), RuntimeError, "'c' has not been declared as poppable"),
        (commands(pop("a")), RuntimeError, "'a' has not been declared as poppable"),
        (commands(pop("b")), RuntimeError, "no earlier layer has stashed"),
        (commands(3), TypeError, "not a command"),
        (commands(lambda: stash("a", 3)), TypeError, "takes a tensor or None"),
    ],
)
def test_broken_promises_are_named(layer: nn.Module, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        layer(torch.ones(1))


def test_skip_inside_a_nested_module_crosses_stages():
    block = Layer(lambda s, x: s.m[0](x), nn.Sequential(linear(), Stash()))
    model = nn.Sequential(block, linear(), nn.Sequential(linear(), Pop()))
    assert_trains_like(piped(model, [1, 1, 1], chunks=2, checkpoint="always"), model)


def test_skip_of_uncalled_layer_raises():
    around = Layer(lambda s, x: x, Stash())
    with pytest.raises(RuntimeError, match=r"'skip' must be stashed .* was not called"):
        piped(nn.Sequential(around, Pop()), [1, 1])(rows())
